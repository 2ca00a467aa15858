"""Gates: silu(gate) * up of the two halves of one tensor."""

from torch.fx import Node

from services.engine.compilation.passes.canonical.halves import whole_of
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace

_GATE, _UP = Operand("gate"), Operand("up")
_GATES = (
    Call("mul", (Call("silu", (_GATE, False)), _UP)),
    Call("mul", (Call("mul", (_GATE, Call("sigmoid", (_GATE,)))), _UP)),
)


def use_silu_and_mul(node: Node) -> bool:
    """Rewrites silu(gate) * up."""
    match = find(*_GATES, at=node)
    whole = None if match is None else whole_of(match["gate"], match["up"])
    if whole is None:
        return False
    replace(node, insert_operator(node, "silu_and_mul", whole, like=node))
    return True
