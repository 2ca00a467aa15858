"""Products with the norm before them and the gate after them.

octavo::gated_linear and octavo::norm_linear. Layers do not call them: a compiler's passes insert
them.
"""

import torch
from torch.nn import functional

from models.batch_invariance import is_batch_invariant
from models.kernels.gpu import has_kernels
from models.kernels.tuning.tiles import VectorTiles
from models.operands.weight_scales import is_by_block
from models.ops.custom_op import operator
from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.activation_rounding import rounds_activations
from models.ops.products.fp8_linear import (
    gated_product_of_rounded,
    gated_rounded_product,
    product_of_rounded,
)
from models.ops.products.invariant_linear import invariant_gated_linear
from models.ops.products.linear import linear
from models.ops.products.product_like import product_like
from models.ops.products.product_tiles import tiles_of_few_tokens, tiles_of_many_tokens


@operator(product_like("x", is_gated=True))
def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns silu_and_mul(linear(x)).

    Args:
        x: [T, K].
        weight: [2 * N, K], gate before up.
        bias: [2 * N].
        weight_scale: of an FP8 weight, as in linear.

    Returns:
        [T, N].
    """
    if is_batch_invariant():
        return invariant_gated_linear(x, weight, bias, weight_scale)
    tiles = tiles_of_few_tokens(x, weight, bias, weight_scale, is_gated=True)
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.kernels.products.vector_linear import vector_linear

        return vector_linear(x, weight, bias, tiles, weight_scale=weight_scale, is_gated=True)
    if tiles is not None:
        from models.kernels.products.matrix_linear import matrix_linear

        return matrix_linear(x, weight, bias, tiles, weight_scale=weight_scale, is_gated=True)
    wide = tiles_of_many_tokens(x, weight, bias, is_gated=True)
    if wide is not None:
        from models.kernels.products.wide_linear import wide_linear

        return wide_linear(x, weight, wide, is_gated=True)
    if weight_scale is None:
        return silu_and_mul(functional.linear(x, weight, bias))
    if rounds_in_norm(x, weight_scale):
        return gated_rounded_product(x.contiguous(), weight, bias, weight_scale)
    # A bias, or blocks that gate and up share, rule out one kernel for both, but not the product's.
    return silu_and_mul(linear(x, weight, bias, weight_scale))


@operator(product_like("x"))
def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns gated_linear if is_gated, else linear, of rms_norm(x)."""
    tiles = None
    if not is_batch_invariant():
        tiles = tiles_of_few_tokens(x, weight, bias, weight_scale, is_gated=is_gated)
    if isinstance(tiles, VectorTiles):
        from models.kernels.products.vector_linear import vector_linear

        return vector_linear(
            x, weight, bias, tiles, weight_scale=weight_scale, norm_weight=norm_weight, eps=eps,
            is_gated=is_gated,
        )  # fmt: skip
    if rounds_in_norm(x, weight_scale):
        rounded = rounded_norm(None, x, norm_weight, eps, weight, weight_scale)
        return gated_or_not(*rounded, weight, bias, weight_scale, x.dtype, is_gated=is_gated)
    product = gated_linear if is_gated else linear
    return product(rms_norm(x, norm_weight, eps), weight, bias, weight_scale)


@operator(product_like("residual"), mutates=("residual",))
def add_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs add_rms_norm; returns gated_linear if is_gated, else linear, of its result."""
    if rounds_in_norm(residual, weight_scale) and residual.is_contiguous():
        rounded = rounded_norm(x, residual, norm_weight, eps, weight, weight_scale)
        return gated_or_not(*rounded, weight, bias, weight_scale, residual.dtype, is_gated=is_gated)
    normed = add_rms_norm(x, residual, norm_weight, eps)
    return (gated_linear if is_gated else linear)(normed, weight, bias, weight_scale)


def rounds_in_norm(x: torch.Tensor, weight_scale: torch.Tensor | None) -> bool:
    """Returns whether the norm's kernel rounds x [T, K] for a product with FP8 weights."""
    return (
        weight_scale is not None
        and has_kernels(x.device)
        and not is_batch_invariant()
        and rounds_activations(x.shape[0], x.dtype)
    )


def rounded_norm(
    added: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds to the residual in place, if there is something to add; rounds its norm to FP8.

    added: [T, H], or its addends in float32, [S, T, H].
    weight, weight_scale: of the product that follows, which decide how many features share a scale.

    Returns:
        [T, H] FP8 and its scales.
    """
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.elementwise import rms_norm as kernels

    is_blocked = is_by_block(weight, weight_scale)
    if added is None:
        return kernels.rounded_rms_norm(residual, norm_weight, eps, is_blocked=is_blocked)
    return kernels.add_rounded_rms_norm(added, residual, norm_weight, eps, is_blocked=is_blocked)


def gated_or_not(  # each is an operand of the product
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Returns gated_linear if is_gated, else linear, of activations that a norm has rounded."""
    assert weight_scale is not None, "rounds_in_norm checked it"
    product = gated_product_of_rounded if is_gated else product_of_rounded
    return product(rounded, scale, weight, weight_scale, bias, dtype)
