"""Runs the expert that all tokens share beside the routed ones, on a second stream."""

from collections.abc import Mapping

import torch
from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace

_HIDDEN = Operand("hidden")
_ARGUMENTS = torch.ops.octavo.fused_moe.default._schema.arguments
_ROUTED = tuple(each.name for each in _ARGUMENTS if not each.has_default_value())
_WITHOUT_ADAPTERS = (None,) * (len(_ARGUMENTS) - len(_ROUTED))
_FIRST = ("shared_gate_up", "shared_gate_up_scale", "shared_gate_up_bias")
_SECOND = ("shared_down", "shared_down_scale", "shared_down_bias")


def _product(name: str, x: Call | Operand, weight: tuple[str, str, str]) -> Call:
    values, scale, bias = map(Operand, weight)
    return Call(name, (x, values, bias, scale))


_GATED = (
    _product("octavo::gated_linear", _HIDDEN, _FIRST),
    Call("octavo::silu_and_mul", (_product("octavo::linear", _HIDDEN, _FIRST),)),
)
_SHARED = tuple(_product("octavo::linear", gated, _SECOND) for gated in _GATED)
_EXPERTS = Call("octavo::fused_moe", (*map(Operand, _ROUTED), *_WITHOUT_ADAPTERS))
_GATE = Call("sigmoid", (Call("octavo::linear", (_HIDDEN, Operand("shared_gate"), None, None)),))
_SUMS = tuple(
    Call("add", (_EXPERTS, added, 1))
    for shared in _SHARED
    for added in (shared, Call("mul", (_GATE, shared)))
)


class MultiStreamPass(NodePass):
    """fused_moe(x) + down(gate(x)) becomes fused_moe_with_shared, with two streams or more.

    A factor of the second term, the sigmoid of a product with x, becomes part of it.

    Queries, keys and values are one product, which leaves nothing to run beside it.
    """

    name = "multi_stream"

    def __init__(self, max_num_streams: int) -> None:
        self._max_num_streams = max_num_streams

    @property
    def settings(self) -> Mapping[str, int]:
        """The most streams."""
        return {"max_num_streams": self._max_num_streams}

    def _fuse(self, total: Node) -> bool:
        match = find(*_SUMS, at=total)
        if match is None:
            return False
        arguments = [match[name] for name in (*_ROUTED, *_FIRST, *_SECOND)]
        arguments.append(match.values.get("shared_gate"))
        replace(total, insert_operator(total, "fused_moe_with_shared", *arguments, like=total))
        return True
