"""Lets the sum of a product over ranks begin while the product is computed."""

import torch
from torch.fx import Graph, Node

from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.operations import operation_of
from services.engine.compilation.passes.sequence_parallel import GROUP, IS_SUMMED
from services.engine.compilation.split_graph import operator_name

_NORMS = ("octavo::sequence_parallel_norm", "octavo::sequence_parallel_norm_linear")


class AsyncTPPass(GraphPass):
    """A linear that only a sequence_parallel_norm reads becomes linear_reduce_scatter."""

    name = "async_tp"

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        return sum(operator_name(node) in _NORMS and _overlap(node) for node in graph.nodes)


def _overlap(norm: Node) -> bool:
    product, group = norm.args[0], norm.args[GROUP]
    if not isinstance(product, Node) or len(product.users) > 1:
        return False
    operation = operation_of(product)
    if operation is None or operation.name != "octavo::linear":
        return False
    product.target = torch.ops.octavo.linear_reduce_scatter.default
    *operands, is_rounded = operation.args
    assert not is_rounded, "attention_quant runs later"
    product.args, product.kwargs = (*operands, group), {}
    norm.update_arg(IS_SUMMED, True)
    return True
