"""Puts a sum over ranks, its sum with the residual stream and the next norm into one operator."""

from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.residual import next_norm, own_residual
from services.engine.compilation.passes.rewriting import has_same_kind, insert_operator, replace

_REDUCED = Call("octavo::all_reduce", (Operand("x"), Operand("group")))
_SUMS = tuple(Call(name, (Operand("residual"), _REDUCED, 1)) for name in ("add", "iadd"))


class AllReduceNormPass(NodePass):
    """rms_norm(residual + all_reduce(x)) becomes all_reduce_norm; the residual becomes the sum."""

    name = "all_reduce_norm"

    def _fuse(self, total: Node) -> bool:
        match = find(*_SUMS, at=total)
        if match is None:
            return False
        norm = next_norm(total)
        if norm is None or not has_same_kind(match["x"], total):
            return False
        residual = own_residual(total, match["residual"], [match["x"]])
        if residual is None:
            return False
        arguments = (match["x"], residual, norm.weight, norm.eps, match["group"])
        fused = insert_operator(total, "all_reduce_norm", *arguments, like=norm.node)
        replace(total, residual)
        replace(norm.node, fused)
        return True
