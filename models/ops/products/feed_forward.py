"""Two products of a gated feed-forward layer with FP8 weights: octavo::feed_forward.

Layers do not call it: a compiler's pass inserts it.
"""

import torch

from models.operands.weight_scales import is_by_block
from models.ops.custom_op import operator
from models.ops.elementwise.rms_norm import add_rms_norm
from models.ops.products.fp8_linear import product_of_rounded, rounded_gated_product
from models.ops.products.linear_residual import (
    add_product,
    linear_residual_norm,
    linear_residual_norm_linear,
)
from models.ops.products.norm_linear import add_norm_linear, rounded_norm, rounds_in_norm
from models.ops.products.product_like import product_like


@operator(product_like("residual", "next_weight", "is_next_gated"), mutates=("residual",))
def feed_forward(  # noqa: PLR0913  # an operator takes no dataclasses
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    last_norm_weight: torch.Tensor,
    last_eps: float,
    next_weight: torch.Tensor | None,
    next_bias: torch.Tensor | None,
    is_next_gated: bool,
    weight_scale: torch.Tensor | None,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    next_scale: torch.Tensor | None,
    is_rounded: bool = False,
) -> torch.Tensor:
    """Runs linear_residual_norm_linear to the gate, and the next product after it.

    The second is linear_residual_norm_linear again, or without a next weight linear_residual_norm.
    The gate of many tokens rounds its result in its own kernel.

    residual [T, H] takes both sums in place; x [T, K] and weight [H, K] are of attention's output;
    gate_up [2 * I, H] and down [H, I] are FP8; a next weight is [N, H]. Scales are as in linear,
    and so is is_rounded, of x.

    Returns:
        [T, N], of a gated next weight [T, N / 2]; without one the norm, [T, H].
    """
    first = (residual, x, weight, bias, norm_weight, eps, gate_up, gate_up_bias)
    if not rounds_in_norm(residual, gate_up_scale) or not residual.is_contiguous():
        inner = linear_residual_norm_linear(*first, True, weight_scale, gate_up_scale, is_rounded)
        product = (residual, inner, down, down_bias, last_norm_weight, last_eps)
        if next_weight is None:
            return linear_residual_norm(*product, down_scale)
        return linear_residual_norm_linear(
            *product, next_weight, next_bias, is_next_gated, down_scale, next_scale
        )
    added = add_product(residual, x, weight, bias, weight_scale, is_rounded=is_rounded)
    normed = rounded_norm(added, residual, norm_weight, eps, gate_up, gate_up_scale)
    gate = (*normed, gate_up, gate_up_scale, gate_up_bias, residual.dtype)
    gated = rounded_gated_product(*gate, is_blocked=is_by_block(down, down_scale))
    output = product_of_rounded(*gated, down, down_scale, down_bias, residual.dtype, may_split=True)
    following = (output, residual, last_norm_weight, last_eps)
    if next_weight is None:
        return add_rms_norm(*following)
    return add_norm_linear(*following, next_weight, next_bias, is_next_gated, next_scale)
