"""Changes a Dynamo graph in place and keeps the fake tensors of its nodes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node, map_arg
from torch.utils._pytree import tree_leaves

import services.engine.compilation.program.inserted_operators  # noqa: F401  # registers them
from services.engine.compilation.passes.aliasing import storages, written
from services.engine.compilation.passes.operations import tensor_of

_KEPT = ("example_value", "stack_trace")


def insert(before: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Inserts a call of a function in front of a node, with the fake tensors of its result.

    The arguments must be computed before that node.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    if "stack_trace" in before.meta:
        node.meta["stack_trace"] = before.meta["stack_trace"]
    _compute(node)
    return node


def insert_operator(before: Node, name: str, *args: Any, like: Node | None = None) -> Node:
    """Inserts a call of one of Octavo's operators in front of a node.

    Args:
        before: the arguments must be computed before this node.
        name: of the operator, without the namespace.
        args: all of the operator's.
        like: computes the same value and is going to be removed.
    """
    target = getattr(torch.ops.octavo, name).default
    if like is None or not is_contiguous(like):
        return insert(before, target, *args)
    # Operators return contiguous tensors; computing this fake one again takes milliseconds.
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in _KEPT if key in like.meta}
    return node


def replace(node: Node, new: Node) -> None:
    """Makes all users of a node use another; removes the node."""
    memory, users = storages(node), list(node.users)
    node.replace_all_uses_with(new)
    remove(node)
    if storages(new) != memory:
        for user in users:
            _compute_views(user, memory)


def remove(node: Node) -> None:
    """Removes a node that nothing uses, then the calls that only it used and that write nothing."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        if not each.users and each.op in ("call_function", "call_method") and not written(each):
            remove(each)


def are_before(node: Node, values: Sequence[Any]) -> bool:
    """Whether all nodes among the values come before a node."""
    return all(each < node for each in values if isinstance(each, Node))


def is_contiguous(node: Node) -> bool:
    """Whether a node's tensor is contiguous for any number of tokens."""
    tensor = tensor_of(node)
    if tensor is None:
        return False
    strides: list[Any] = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return same_shape(tensor.stride(), strides[: tensor.dim()])


def has_same_kind(node: Any, other: Any) -> bool:
    """Whether two nodes compute tensors of the same shape, dtype and device."""
    first, second = tensor_of(node), tensor_of(other)
    if first is None or second is None:
        return False
    is_same_kind = first.dtype == second.dtype and first.device == second.device
    return is_same_kind and same_shape(first.shape, second.shape)


def same_shape(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two shapes are equal for any number of tokens."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(first) == len(second) and all(
        statically_known_true(a == b) for a, b in zip(first, second, strict=True)
    )


def _compute_views(node: Node, memory: frozenset[int]) -> None:
    """Computes the fake tensors of a view of replaced memory, and of views of that, once more."""
    if not memory & storages(node):
        return
    _compute(node)
    for user in node.users:
        _compute_views(user, memory)


def _compute(node: Node) -> None:
    """Computes the fake tensors of a node from those of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["example_value"])
    # While a backend runs, the current mode is not the one that Dynamo traced with.
    modes = (each.fake_mode for each in tree_leaves(args) if isinstance(each, FakeTensor))
    with next(modes), torch.no_grad():
        if node.op == "call_method":
            source, *others = args
            node.meta["example_value"] = getattr(source, str(node.target))(*others, **kwargs)
        else:
            assert callable(node.target), "other nodes have no arguments"
            node.meta["example_value"] = node.target(*args, **kwargs)
