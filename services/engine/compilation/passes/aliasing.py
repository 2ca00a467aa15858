"""Which values of a graph share memory, and which nodes write to it."""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

_IN_PLACE = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.iand,
        operator.ior,
        operator.ixor,
    }
)


def storages(node: Node) -> frozenset[int]:
    """Returns the identities of the memory that a node's tensors are in."""
    value = node.meta.get("example_value")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return frozenset(each.untyped_storage()._cdata for each in tensors if isinstance(each, Tensor))


def share_memory(value: object, other: object) -> bool:
    """Whether two values are nodes with tensors in the same memory."""
    if not isinstance(value, Node) or not isinstance(other, Node):
        return False
    return bool(storages(value) & storages(other))


def aliases(node: Node) -> set[Node]:
    """Returns the nodes whose tensors are in the same memory as a node's, itself included."""
    memory = storages(node)
    found, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        for other in (*each.all_input_nodes, *each.users):
            if other not in found and memory & storages(other):
                found.add(other)
                waiting.append(other)
    return found


def is_last_reader(node: Node, value: Node) -> bool:
    """Whether a node may overwrite a value: nothing later reads it, and no input holds it."""
    for alias in aliases(value):
        if alias.op in ("placeholder", "get_attr"):
            return False
        if any(user > node for user in alias.users):
            return False
    return True


def is_written_between(values: Iterable[Node], first: Node, last: Node) -> bool:
    """Whether a node after `first` and before `last` writes to the memory of any value."""
    memory = frozenset[int]().union(*(storages(each) for each in values))
    node = first.next
    while node is not last:
        if any(memory & storages(each) for each in written(node)):
            return True
        node = node.next
    return False


def written(node: Node) -> list[Node]:
    """Returns the arguments that a node writes to."""
    arguments: list[object] = []
    if node.op == "call_method":
        name = str(node.target)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            arguments.append(node.args[0])
    elif node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = target.default
        if isinstance(target, torch._ops.OpOverload):
            arguments += _mutable_arguments(target, node)
        elif target in _IN_PLACE or _is_in_place(target, node):
            arguments.append(node.args[0])
        arguments.append(node.kwargs.get("out"))
    return [each for each in arguments if isinstance(each, Node)]


def _is_in_place(target: object, node: Node) -> bool:
    """Whether a function of torch writes to its first argument."""
    name = getattr(target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


def _mutable_arguments(target: torch._ops.OpOverload, node: Node) -> list[object]:
    found: list[object] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found.append(value)
    return found
