"""Puts a product, its sum with the residual stream and the next norm into one operator."""

from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.residual import next_norm, own_residual
from services.engine.compilation.passes.rewriting import insert_operator, replace

_PRODUCT = Call("octavo::linear", tuple(map(Operand, ("x", "weight", "bias", "weight_scale"))))
_SUMS = tuple(Call(name, (Operand("residual"), _PRODUCT, 1)) for name in ("add", "iadd"))


class LinearResidualPass(NodePass):
    """residual + linear(x) becomes linear_residual; with the norm of the sum linear_residual_norm.

    The residual becomes the sum.
    """

    name = "linear_residual"

    def _fuse(self, total: Node) -> bool:
        match = find(*_SUMS, at=total)
        if match is None:
            return False
        product = (match["x"], match["weight"], match["bias"])
        residual = own_residual(total, match["residual"], product)
        if residual is None:
            return False
        norm = next_norm(total)
        if norm is None:
            insert_operator(total, "linear_residual", residual, *product, match["weight_scale"])
            replace(total, residual)
        else:
            arguments = (residual, *product, norm.weight, norm.eps, match["weight_scale"])
            fused = insert_operator(total, "linear_residual_norm", *arguments, like=norm.node)
            replace(total, residual)
            replace(norm.node, fused)
        return True
