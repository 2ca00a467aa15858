"""Puts a gate into the product before it."""

from torch.fx import Node

from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace

_OPERANDS = ("x", "weight", "bias", "weight_scale")
_GATED = Call("octavo::silu_and_mul", (Call("octavo::linear", tuple(map(Operand, _OPERANDS))),))
_PACKED_OPERANDS = ("x", "weight", "weight_scale", "weight_zero", "bias")
_PACKED = Call("octavo::packed_linear", (*map(Operand, _PACKED_OPERANDS), False))
_PACKED_GATED = Call("octavo::silu_and_mul", (_PACKED,))
_ADAPTED_OPERANDS = (*_OPERANDS, "adapter_a", "adapter_b", "part_sizes")
_ADAPTED = Call("octavo::adapted_linear", (*map(Operand, _ADAPTED_OPERANDS), False))
_FLAGGED = (
    ("packed_linear", _PACKED_OPERANDS, _PACKED_GATED),
    ("adapted_linear", _ADAPTED_OPERANDS, Call("octavo::silu_and_mul", (_ADAPTED,))),
)
"""Products with a flag for the gate."""


class LinearGatePass(NodePass):
    """silu_and_mul(linear(x)) becomes gated_linear(x); products with a flag for it have it set."""

    name = "linear_gate"

    def _fuse(self, node: Node) -> bool:
        match = find(_GATED, at=node)
        if match is not None:
            operands = [match[name] for name in _OPERANDS]
            replace(node, insert_operator(node, "gated_linear", *operands, like=node))
            return True
        for name, names, pattern in _FLAGGED:
            match = find(pattern, at=node)
            if match is not None:
                operands = [*(match[each] for each in names), True]
                replace(node, insert_operator(node, name, *operands, like=node))
                return True
        return False
