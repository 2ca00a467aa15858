"""Puts a norm into the product after it."""

from torch.fx import Graph, Node

from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import (
    are_before,
    insert_operator,
    remove,
    replace,
)

_NORM = ("x", "norm_weight", "eps")
_SUM_AND_NORM = ("residual", "x", "weight", "bias", "norm_weight", "eps", "weight_scale")
_PRODUCT = ("next_weight", "next_bias", "next_weight_scale")
_ARGUMENTS = {
    "norm_linear": (*_NORM, "next_weight", "next_bias", "is_gated", "next_weight_scale"),
    "linear_residual_norm_linear": (
        *_SUM_AND_NORM[:-1], "next_weight", "next_bias", "is_gated", "weight_scale",
        "next_weight_scale",
    ),
}  # fmt: skip
"""Arguments of the fused operators, in order."""


class NormLinearPass(GraphPass):
    """linear(rms_norm(x)) becomes norm_linear, with or without a gate.

    After linear_residual_norm it becomes linear_residual_norm_linear, one operator of two products.
    """

    name = "norm_linear"

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        return sum(
            _fuse(node, product, norm, fused)
            for node in graph.nodes
            for product in ("linear", "gated_linear")
            for norm, fused in (
                ("rms_norm", "norm_linear"),
                ("linear_residual_norm", "linear_residual_norm_linear"),
            )
        )


def _fuse(node: Node, product: str, norm: str, fused: str) -> bool:
    names = _NORM if norm == "rms_norm" else _SUM_AND_NORM
    inner = Call(f"octavo::{norm}", tuple(map(Operand, names)))
    match = find(Call(f"octavo::{product}", (inner, *map(Operand, _PRODUCT))), at=node)
    if match is None:
        return False
    # The sum stays where it is: later nodes read it.
    place = node if norm == "rms_norm" else match.nodes[1]
    values = {**match.values, "is_gated": product == "gated_linear"}
    arguments = [values[name] for name in _ARGUMENTS[fused]]
    if not are_before(place, arguments):
        return False
    replace(node, insert_operator(place, fused, *arguments, like=node))
    if place is not node:
        remove(place)
    return True
