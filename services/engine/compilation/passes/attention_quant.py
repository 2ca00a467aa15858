"""Lets attention round its output for the FP8 product that reads it."""

from typing import Any

import torch
from torch.fx import Node

from models.number_formats import BLOCK, FP8
from models.operands.weight_scales import is_by_block
from services.engine.compilation.passes.aliasing import aliases, written
from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.operations import named_arguments, tensor_of
from services.engine.compilation.passes.rewriting import is_contiguous, same_shape

_ATTENTION = "unified_attention_with_output"
_PRODUCTS = (
    "linear",
    "linear_residual",
    "linear_residual_norm",
    "linear_residual_norm_linear",
    "feed_forward",
)


class AttentionQuantPass(NodePass):
    """Attention whose output one product of an FP8 weight reads leaves it rounded.

    The weight has scales by block, and each head is one: scales by row need all heads of a token.
    """

    name = "attention_quant"

    def _fuse(self, attention: Node) -> bool:
        arguments = named_arguments(attention, _ATTENTION)
        output = None if arguments is None else arguments["output"]
        if arguments is None or not isinstance(output, Node):
            return False
        product = _only_reader(output, attention)
        operands = None if product is None else named_arguments(product, *_PRODUCTS)
        if product is None or operands is None or not _is_rounded_alike(output, operands):
            return False
        for node, values, flag in (
            (attention, arguments, "rounds"),
            (product, operands, "is_rounded"),
        ):
            node.args, node.kwargs = tuple({**values, flag: True}.values()), {}
        return True


def _only_reader(output: Node, attention: Node) -> Node | None:
    """Returns the node that reads attention's output, if it is one and nothing else writes it."""
    memory = aliases(output)
    users = {user for alias in memory for user in alias.users}
    others = [user for user in users if user is not attention and user not in memory]
    is_written = any(written(user) for user in users if user is not attention and user in memory)
    return others[0] if len(others) == 1 and not is_written else None


def _is_rounded_alike(output: Node, operands: dict[str, Any]) -> bool:
    """Returns whether the product's x is the whole output, and each head of it has a scale."""
    x, weight, scale = (tensor_of(operands[name]) for name in ("x", "weight", "weight_scale"))
    heads = tensor_of(output)
    if x is None or weight is None or heads is None or heads.dim() != 3:
        return False
    size = heads.shape[1] * heads.shape[2]
    # Where the scales begin depends on the number of tokens.
    all_of_it = (heads.storage_offset(), heads.shape[0], size)
    is_whole = same_shape((x.storage_offset(), *x.shape), all_of_it) and size == weight.shape[1]
    is_block = weight.dtype == FP8 and is_by_block(weight, scale) and heads.shape[2] == BLOCK
    is_in_order = is_contiguous(output) and is_contiguous(operands["x"])
    return bool(is_whole and is_block and is_in_order) and x.dtype != torch.float64
