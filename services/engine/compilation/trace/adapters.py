"""Traces of steps without adapters, of models with room for some."""

import copy
from dataclasses import replace

import torch
from torch.fx import Node

import models.ops.products.adapted_linear  # noqa: F401  # registers the operators
from services.engine.compilation.program.program import Trace

_ADDING = (
    torch.ops.octavo.add_adapters.default,
    torch.ops.octavo.add_embedding_adapters.default,
)
_PRODUCT = torch.ops.octavo.adapted_linear.default
_NUM_OF_PLAIN_PRODUCT = 4
"""Arguments of a product that octavo::linear has too, which come first."""


def without_adapters(trace: Trace) -> Trace | None:
    """Returns a copy of a trace whose layers add no adapters; None if none adds some."""
    graph = copy.deepcopy(trace.graph)
    products = graph.graph.find_nodes(op="call_function", target=_PRODUCT)
    adding = [
        node
        for target in _ADDING
        for node in graph.graph.find_nodes(op="call_function", target=target)
    ]
    if not products and not adding:
        return None
    for node in products:
        node.target = torch.ops.octavo.linear.default
        node.args = node.args[:_NUM_OF_PLAIN_PRODUCT]
    for node in adding:
        product = node.args[0]
        assert isinstance(product, Node), "adapters are added to what the layer computes"
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
    graph.recompile()
    return replace(trace, graph=graph)
