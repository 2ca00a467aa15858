"""A sum over ranks, its norm, and the FP8 product after it: octavo::all_reduce_norm_linear.

Layers do not call it: a compiler's pass inserts it.
"""

import torch

from models.operands.weight_scales import is_by_block
from models.ops.custom_op import operator
from models.ops.products.linear import linear
from models.ops.products.norm_linear import (
    add_norm_linear,
    gated_linear,
    gated_or_not,
    rounds_in_norm,
)
from models.ops.products.product_like import product_like
from models.ops.ranks.all_reduce import all_reduce
from models.ops.ranks.all_reduce_norm import all_reduce_norm, fitting_sum
from models.parallel.collectives import begun


@operator(product_like("residual"), mutates=("residual",))
def all_reduce_norm_linear(  # noqa: PLR0913  # an operator takes no dataclasses
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs all_reduce_norm; returns gated_linear if is_gated, else linear, of its result.

    The norm's kernel, or the fused sum's, rounds the input of a product of many tokens.

    Args:
        x: [T, H], this rank's part.
        residual: [T, H], equal on all ranks; becomes the sum.
        norm_weight: [H].
        eps: added to the mean square.
        group: the group's name.
        weight: [N, H], of this rank.
        bias: [N].
        is_gated: whether a gate follows the product.
        weight_scale: of an FP8 weight, as in linear.

    Returns:
        [T, N], with a gate [T, N / 2].
    """
    fused = fitting_sum(x, residual, norm_weight, group)
    if fused is None:
        following = (norm_weight, eps, weight, bias, is_gated, weight_scale)
        return add_norm_linear(all_reduce(x, group), residual, *following)
    if rounds_in_norm(residual, weight_scale):
        is_blocked = is_by_block(weight, weight_scale)
        with begun():
            rounded = fused.add_rounded_norm(x, residual, norm_weight, eps, is_blocked=is_blocked)
        dtype = residual.dtype
        return gated_or_not(*rounded, weight, bias, weight_scale, dtype, is_gated=is_gated)
    normed = all_reduce_norm(x, residual, norm_weight, eps, group)
    return (gated_linear if is_gated else linear)(normed, weight, bias, weight_scale)
