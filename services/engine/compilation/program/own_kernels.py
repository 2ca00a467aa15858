"""Recognises graphs for which a compiler has no code to generate."""

from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from models.ops.custom_op import direct_call

_VIEWS = frozenset({
    "chunk", "flatten", "select", "split", "split_with_sizes", "squeeze", "transpose", "unflatten",
    "unsqueeze", "view",
})  # fmt: skip
"""Methods and functions of torch that return views of contiguous tensors."""
_COPIES = frozenset({"clone", "embedding", "index_select"})
"""Single kernels of torch, which a compiler could only repeat."""
_ALLOCATIONS = frozenset({"new_empty", "empty", "empty_like", "size"})

_FREE = _VIEWS | _COPIES | _ALLOCATIONS


def only_calls_own_kernels(graph: GraphModule) -> bool:
    """Returns whether a graph consists of our operators, views and allocations."""
    return all(_is_free(node) for node in graph.graph.nodes)


def _is_free(node: Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    if node.op == "call_method":
        return node.target in _FREE
    return node.op == "call_function" and _is_free_function(node.target)


def _is_free_function(target: Any) -> bool:
    if target in (getitem, getattr):
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    if direct_call(target) is not None:
        return True
    is_torch = (getattr(target, "__module__", None) or "torch").startswith("torch")
    return is_torch and getattr(target, "__name__", "") in _FREE
