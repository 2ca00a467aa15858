"""Drops Dynamo's checks of sizes from a traced graph."""

import operator

import torch
from torch.fx import Graph

_CHECK = torch.ops.aten._assert_scalar.default
_OF_SIZES = frozenset({
    operator.eq, operator.ge, operator.le, operator.gt, operator.lt, torch.sym_not,
    torch.ops.aten.sym_size.int,
})  # fmt: skip


def drop_size_checks(graph: Graph) -> None:
    """Removes the checks that inputs are as long as each other, and what only they use.

    The runner makes all inputs of a step of one length. One of the checks imports sympy when it
    runs, which takes a second of a start.
    """
    for node in graph.find_nodes(op="call_function", target=_CHECK):
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _OF_SIZES and not node.users:
            graph.erase_node(node)
