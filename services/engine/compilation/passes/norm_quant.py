"""Puts a norm after a sum into the FP8 product after it."""

from torch.fx import Graph, Node

from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.pattern import Call, Operand, find
from services.engine.compilation.passes.rewriting import (
    are_before,
    insert_operator,
    remove,
    replace,
)

_SUM = ("x", "residual", "norm_weight", "eps")
_NORMS = {
    "add_rms_norm": (_SUM, "add_norm_linear"),
    "all_reduce_norm": ((*_SUM, "group"), "all_reduce_norm_linear"),
}
"""Norm of a sum -> its operands, and the operator that adds a product."""
_PRODUCT = ("weight", "bias", "weight_scale")


class NormQuantPass(GraphPass):
    """linear(add_rms_norm(x, residual)) of an FP8 weight becomes add_norm_linear.

    After all_reduce_norm it becomes all_reduce_norm_linear. Sums that are no products, such as
    those of experts or over ranks, come before such norms. The norm then rounds what the product of
    many tokens multiplies.
    """

    name = "norm_quant"

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        return sum(
            _fuse(node, product, norm)
            for node in graph.nodes
            for product in ("linear", "gated_linear")
            for norm in _NORMS
        )


def _fuse(node: Node, product: str, norm: str) -> bool:
    names, fused = _NORMS[norm]
    inner = Call(f"octavo::{norm}", tuple(map(Operand, names)))
    match = find(Call(f"octavo::{product}", (inner, *map(Operand, _PRODUCT))), at=node)
    if match is None or match["weight_scale"] is None:
        return False
    # The sum stays where it is: later nodes read it.
    place = match.nodes[1]
    operands = [match["weight"], match["bias"], product == "gated_linear", match["weight_scale"]]
    if not are_before(place, operands):
        return False
    arguments = [*(match[name] for name in names), *operands]
    replace(node, insert_operator(place, fused, *arguments, like=node))
    remove(place)
    return True
