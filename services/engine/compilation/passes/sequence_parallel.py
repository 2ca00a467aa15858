"""Lets each rank add and normalise its share of the rows of the residual stream."""

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from services.engine.compilation.passes.aliasing import aliases, share_memory, storages, written
from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.rewriting import has_same_kind, insert
from services.engine.compilation.split_graph import operator_name

_NORMS = {
    "octavo::all_reduce_norm": torch.ops.octavo.sequence_parallel_norm.default,
    "octavo::all_reduce_norm_linear": torch.ops.octavo.sequence_parallel_norm_linear.default,
}
_SUM = "octavo::all_reduce"
GROUP = 4
"""Position of the group in all these operators."""
IS_SUMMED = 5
"""Position of an argument in the operators that the pass inserts."""


class SequenceParallelPass(GraphPass):
    """all_reduce_norm becomes sequence_parallel_norm, with a product after it or without.

    The rows of other ranks in the residual stream are out of date after that, so other nodes that
    read the stream get a gather_residual before them.
    """

    name = "sequence_parallel"

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        norms = [node for node in graph.nodes if operator_name(node) in _NORMS]
        groups = {node.args[GROUP] for node in norms}
        if len(groups) != 1 or not _follow_each_other(graph, norms):
            return 0
        for node in norms:
            node.target = _NORMS[str(operator_name(node))]
            node.args = (*node.args[:IS_SUMMED], False, *node.args[IS_SUMMED:])
        streams = {storages(_residual(node)): _residual(node) for node in norms}
        for residual in streams.values():
            _gather_for_readers(residual, norms)
        return len(norms)


def _follow_each_other(graph: Graph, norms: Sequence[Node]) -> bool:
    """Whether no sum of rows over ranks is between the norms, and at most one on either side.

    Layers that are not traced repeat traced ones, wherever they are: the rows that a layer takes
    must be up to date after all other layers or after none.
    """
    rows = norms[0].args[0]
    others = [
        node for node in graph.nodes if operator_name(node) == _SUM and has_same_kind(node, rows)
    ]
    num_before: int = sum(node < norms[0] for node in others)
    num_after: int = sum(norms[-1] < node for node in others)
    return max(num_before, num_after) <= 1 and num_before + num_after == len(others)


def _gather_for_readers(residual: Node, norms: Sequence[Node]) -> None:
    """Inserts a gather_residual before other nodes that read a stream after a norm of it.

    After the stream's last norm one is enough.
    """
    own = [node for node in norms if share_memory(_residual(node), residual)]
    is_whole = False
    for node in sorted({user for alias in aliases(residual) for user in alias.users}):
        if own[0] < node and not is_whole and node not in own and not _is_view(node, residual):
            group = own[0].args[GROUP]
            insert(node, torch.ops.octavo.gather_residual.default, residual, group)
            is_whole = own[-1] < node


def _is_view(node: Node, residual: Node) -> bool:
    return share_memory(node, residual) and not written(node)


def _residual(norm: Node) -> Node:
    residual = norm.args[1]
    assert isinstance(residual, Node), "passes give all arguments by position"
    return residual
