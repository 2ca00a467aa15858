"""Traces of steps without adapters, of models with room for some."""

import copy
from dataclasses import replace

import torch
from torch.fx import Node

import models.ops.products.add_adapters  # noqa: F401  # registers the operators
from services.engine.compilation.program.program import Trace

_ADDING = (
    torch.ops.octavo.expand_adapters.default,
    torch.ops.octavo.add_embedding_adapters.default,
)
_SHRINKING = torch.ops.octavo.shrink_adapters.default


def without_adapters(trace: Trace) -> Trace | None:
    """Returns a copy of a trace whose layers add no adapters; None if none adds some."""
    graph = copy.deepcopy(trace.graph)
    adding = [
        node
        for target in _ADDING
        for node in graph.graph.find_nodes(op="call_function", target=target)
    ]
    if not adding:
        return None
    for node in adding:
        product = node.args[0]
        assert isinstance(product, Node), "adapters are added to what the layer computes"
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="call_function", target=_SHRINKING):
        graph.graph.erase_node(node)
    graph.recompile()
    return replace(trace, graph=graph)
