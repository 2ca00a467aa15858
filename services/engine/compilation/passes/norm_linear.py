"""Puts a norm into the product after it."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import (
    are_before,
    insert_operator,
    remove,
    replace,
)

_NORM = ("norm_weight", "eps")
_PRODUCT = ("weight", "bias", "weight_scale")
_ROWS = {
    "rms_norm": (("x", *_NORM), _PRODUCT, "norm_linear"),
    "linear_residual_norm": (
        ("residual", "x", "weight", "bias", *_NORM, "weight_scale"),
        tuple(f"next_{name}" for name in _PRODUCT),
        "linear_residual_norm_linear",
    ),
    "add_rms_norm": (("x", "residual", *_NORM), _PRODUCT, "add_norm_linear"),
    "all_reduce_norm": (
        ("x", "residual", *_NORM, "group"), _PRODUCT, "all_reduce_norm_linear",
    ),
}  # fmt: skip
"""Norm -> its operands, those of the product, and the operator of both, by its arguments' names."""


class NormLinearPass(NodePass):
    """linear(rms_norm(x)) becomes norm_linear, with or without a gate.

    After linear_residual_norm it becomes linear_residual_norm_linear, one operator of two products.
    """

    name = "norm_linear"

    norms: ClassVar[Sequence[str]] = ("rms_norm", "linear_residual_norm")
    needs_scale = False

    def _fuse(self, node: Node) -> bool:
        return any(
            _fuse(node, product, norm, needs_scale=self.needs_scale)
            for product in ("linear", "gated_linear")
            for norm in self.norms
        )


class NormQuantPass(NormLinearPass):
    """linear(add_rms_norm(x, residual)) of an FP8 weight becomes add_norm_linear.

    After all_reduce_norm it becomes all_reduce_norm_linear. Sums that are no products, such as
    those of experts or over ranks, come before such norms. The norm then rounds what the product of
    many tokens multiplies.
    """

    name = "norm_quant"

    norms = ("add_rms_norm", "all_reduce_norm")
    needs_scale = True


def _fuse(node: Node, product: str, norm: str, *, needs_scale: bool) -> bool:
    names, operands, fused = _ROWS[norm]
    inner = Call(f"octavo::{norm}", tuple(map(Operand, names)))
    match = find(Call(f"octavo::{product}", (inner, *map(Operand, operands))), at=node)
    if match is None or (needs_scale and match["weight_scale"] is None):
        return False
    # A sum stays where it is: later nodes read it.
    place = match.nodes[1] if "residual" in names else node
    values = {**match.values, "is_gated": product == "gated_linear"}
    schema = getattr(torch.ops.octavo, fused).default._schema
    arguments = [values[each.name] for each in schema.arguments if each.name in values]
    if not are_before(place, arguments):
        return False
    replace(node, insert_operator(place, fused, *arguments, like=node))
    if place is not node:
        remove(place)
    return True
