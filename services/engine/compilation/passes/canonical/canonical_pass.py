"""Turns other spellings of products, norms, gates and rotations into Octavo's operators."""

from collections.abc import Sequence
from pathlib import Path

from torch.fx import Graph, Node

from services.engine.compilation.passes.canonical.halves import whole_of
from services.engine.compilation.passes.canonical.norm import use_rms_norm
from services.engine.compilation.passes.canonical.rotary import use_rotary
from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.operations import operation_of, tensor_of
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace
from services.engine.compilation.passes.views import remove_views

_GATE, _UP = Operand("gate"), Operand("up")
_GATES = (
    Call("mul", (Call("silu", (_GATE, False)), _UP)),
    Call("mul", (Call("mul", (_GATE, Call("sigmoid", (_GATE,)))), _UP)),
)


def use_linear(node: Node) -> bool:
    """Rewrites functional.linear of [T, K] and [N, K]."""
    operation = operation_of(node)
    if operation is None or operation.name != "linear":
        return False
    x, weight = (tensor_of(value) for value in operation.args[:2])
    if x is None or weight is None or (x.dim(), weight.dim()) != (2, 2) or x.dtype != weight.dtype:
        return False
    replace(node, insert_operator(node, "linear", *operation.args, like=node))
    return True


def use_silu_and_mul(node: Node) -> bool:
    """Rewrites silu(gate) * up."""
    match = find(*_GATES, at=node)
    whole = None if match is None else whole_of(match["gate"], match["up"])
    if whole is None:
        return False
    replace(node, insert_operator(node, "silu_and_mul", whole, like=node))
    return True


_REWRITES = (use_linear, use_rms_norm, use_silu_and_mul, use_rotary)


class CanonicalPass(NodePass):
    """Models written by other conventions get the operators that the later passes look for."""

    name = "canonical"

    @property
    def sources(self) -> Sequence[Path]:
        """All files of this folder."""
        return sorted(Path(__file__).parent.glob("*.py"))

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        remove_views(graph)
        return super().run(graph)

    def _fuse(self, node: Node) -> bool:
        return any(rewrite(node) for rewrite in _REWRITES)
