"""Products with a weight."""

from torch.fx import Node

from services.engine.compilation.passes.operations import operation_of, tensor_of
from services.engine.compilation.passes.rewriting import insert_operator, replace


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
