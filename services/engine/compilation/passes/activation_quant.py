"""Puts the products before and after a gate into one operator, where both weights are FP8."""

from torch.fx import Node

from services.engine.compilation.passes.aliasing import is_written_between, storages
from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.operations import named_arguments
from services.engine.compilation.passes.rewriting import insert_operator, remove, replace

_FIRST = "linear_residual_norm_linear"
_SECOND = ("linear_residual_norm_linear", "linear_residual_norm")


class ActivationQuantPass(NodePass):
    """Two fused products of one stream with a gate between them become feed_forward.

    The gate then rounds what the second product of many tokens multiplies.
    """

    name = "activation_quant"

    def _fuse(self, node: Node) -> bool:
        second = named_arguments(node, *_SECOND)
        inner = None if second is None else second["x"]
        first = named_arguments(inner, _FIRST) if isinstance(inner, Node) else None
        if second is None or first is None or not isinstance(inner, Node):
            return False
        scales = (first["next_weight_scale"], second["weight_scale"])
        if None in scales or not first["is_gated"] or list(inner.users) != [node]:
            return False
        residual = first["residual"]
        if second["residual"] is not residual or not _can_wait(inner, node, residual):
            return False
        arguments = (
            residual, first["x"], first["weight"], first["bias"], first["norm_weight"],
            first["eps"], first["next_weight"], first["next_bias"],
            second["weight"], second["bias"], second["norm_weight"], second["eps"],
            second.get("next_weight"), second.get("next_bias"), second.get("is_gated", False),
            first["weight_scale"], *scales, second.get("next_weight_scale"),
        )  # fmt: skip
        replace(node, insert_operator(node, "feed_forward", *arguments, like=node))
        if not inner._erased:
            remove(inner)
        return True


def _can_wait(first: Node, second: Node, residual: Node) -> bool:
    """Returns whether the first product may run as late as the second.

    Nothing between them reads the stream, which has the first sum there, or changes what the first
    product reads.
    """
    if is_written_between(first.all_input_nodes, first, second):
        return False
    memory = storages(residual)
    node = first.next
    while node is not second:
        if any(memory & storages(each) for each in node.all_input_nodes):
            return False
        node = node.next
    return True
