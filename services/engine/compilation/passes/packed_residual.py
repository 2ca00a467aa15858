"""Puts a product of a packed weight into the sum and the norm after it."""

from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace

_PRODUCT = ("x", "weight", "weight_scale", "weight_zero", "bias")
_NORM = ("norm_weight", "eps")
_SUM_AND_NORM = Call(
    "octavo::add_rms_norm",
    (
        Call("octavo::packed_linear", (*map(Operand, _PRODUCT), False)),
        Operand("residual"),
        *map(Operand, _NORM),
    ),
)


class PackedResidualPass(NodePass):
    """add_rms_norm(packed_linear(x), residual) becomes packed_linear_residual_norm.

    The product may then leave its sums in parts.
    """

    name = "packed_residual"

    def _fuse(self, node: Node) -> bool:
        match = find(_SUM_AND_NORM, at=node)
        if match is None:
            return False
        arguments = [match[name] for name in ("residual", *_PRODUCT, *_NORM)]
        replace(node, insert_operator(node, "packed_linear_residual_norm", *arguments, like=node))
        return True
