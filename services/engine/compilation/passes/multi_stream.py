"""Runs the expert that all tokens share beside the routed ones, on a second stream."""

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.pattern import Call, Match, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace

_HIDDEN = Operand("hidden")
_ROUTED = tuple(argument.name for argument in torch.ops.octavo.fused_moe.default._schema.arguments)
_FIRST = ("shared_gate_up", "shared_gate_up_scale", "shared_gate_up_bias")
_SECOND = ("shared_down", "shared_down_scale", "shared_down_bias")


def _product(x: Call | Operand, weight: tuple[str, str, str]) -> Call:
    name, _, bias = weight
    return Call("octavo::linear", (x, Operand(name), Operand(bias)))


def _fp8_product(x: Call | Operand, weight: tuple[str, str, str]) -> Call:
    return Call("octavo::fp8_linear", (x, *map(Operand, weight), Operand("is_blocked")))


def _gated(product: Call) -> Call:
    return Call("octavo::silu_and_mul", (product,))


_GATED_LINEAR = Call("octavo::gated_linear", (_HIDDEN, Operand(_FIRST[0]), Operand(_FIRST[2])))
_SHARED = (
    _product(_GATED_LINEAR, _SECOND),
    _product(_gated(_product(_HIDDEN, _FIRST)), _SECOND),
    _fp8_product(_gated(_fp8_product(_HIDDEN, _FIRST)), _SECOND),
)
_SUMS = tuple(
    Call("add", (Call("octavo::fused_moe", tuple(map(Operand, _ROUTED))), shared, 1))
    for shared in _SHARED
)


class MultiStreamPass(GraphPass):
    """fused_moe(x) + down(gate(x)) becomes fused_moe_with_shared, with two streams or more.

    Queries, keys and values are one product, which leaves nothing to run beside it.
    """

    name = "multi_stream"

    def __init__(self, max_num_streams: int) -> None:
        self._max_num_streams = max_num_streams

    @property
    def settings(self) -> Mapping[str, int]:
        """The most streams."""
        return {"max_num_streams": self._max_num_streams}

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        matches = ((node, find(*_SUMS, at=node)) for node in graph.nodes)
        return sum(match is not None and _fuse(node, match) for node, match in matches)


def _fuse(total: Node, match: Match) -> bool:
    values = {**dict.fromkeys((*_FIRST, *_SECOND)), "is_blocked": False, **match.values}
    arguments = (values[name] for name in (*_ROUTED, *_FIRST, *_SECOND, "is_blocked"))
    replace(total, insert_operator(total, "fused_moe_with_shared", *arguments, like=total))
    return True
