"""Puts a sum with the residual stream and the next norm into one operator."""

from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.operations import operation_of
from services.engine.compilation.passes.residual import next_norm, own_residual
from services.engine.compilation.passes.rewriting import has_same_kind, insert_operator, replace


class ResidualNormPass(NodePass):
    """rms_norm(residual + x) becomes add_rms_norm; the residual becomes the sum."""

    name = "residual_norm"

    def _fuse(self, total: Node) -> bool:
        operation = operation_of(total)
        if operation is None or operation.name not in ("add", "iadd"):
            return False
        first, second, alpha = operation.args
        norm = next_norm(total)
        if norm is None or alpha != 1 or not all(has_same_kind(x, total) for x in (first, second)):
            return False
        # The stream is older than what is added to it.
        is_reversed = operation.name == "add" and second < first
        residual, x = (second, first) if is_reversed else (first, second)
        owned = own_residual(total, residual, [x])
        if owned is None:
            return False
        arguments = (x, owned, norm.weight, norm.eps)
        fused = insert_operator(total, "add_rms_norm", *arguments, like=norm.node)
        replace(total, owned)
        replace(norm.node, fused)
        return True
