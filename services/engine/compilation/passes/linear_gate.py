"""Puts a gate into the product before it."""

from torch.fx import Graph

from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace

_OPERANDS = ("x", "weight", "bias", "weight_scale")
_GATED = Call("octavo::silu_and_mul", (Call("octavo::linear", tuple(map(Operand, _OPERANDS))),))


class LinearGatePass(GraphPass):
    """silu_and_mul(linear(x)) becomes gated_linear(x)."""

    name = "linear_gate"

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        num_matches = 0
        for node in graph.nodes:
            match = find(_GATED, at=node)
            if match is not None:
                operands = (match[name] for name in _OPERANDS)
                replace(node, insert_operator(node, "gated_linear", *operands, like=node))
                num_matches += 1
        return num_matches
