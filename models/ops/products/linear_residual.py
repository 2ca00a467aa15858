"""Products that are added to the residual stream in place, with the norm or the product after it.

octavo::linear_residual, octavo::linear_residual_norm and octavo::linear_residual_norm_linear.
Layers do not call them: a compiler's passes insert them.
"""

import torch

from models.batch_invariance import is_batch_invariant
from models.kernels.gpu import has_kernels
from models.kernels.tuning.tiles import VectorTiles
from models.ops.custom_op import like, operator
from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.products.activation_rounding import leaves_rounded
from models.ops.products.fp8_linear import product_of_stored, rounded_product
from models.ops.products.invariant_linear import invariant_addends
from models.ops.products.linear import linear
from models.ops.products.norm_linear import add_norm_linear, norm_linear, rounds_in_norm
from models.ops.products.product_like import product_like
from models.ops.products.product_tiles import tiles_of_few_tokens, tiles_of_many_tokens

_MANY_TOKENS = 512
"""From this many tokens on torch's product adds to the residual stream faster than the next norm
does."""


@operator(mutates=("residual",))
def linear_residual(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None = None,
    is_rounded: bool = False,
) -> None:
    """Adds x @ weight^T + bias to the residual stream in place.

    Args:
        residual: [T, N].
        x: [T, K].
        weight: [N, K].
        bias: [N].
        weight_scale: of an FP8 weight, as in linear.
        is_rounded: as in linear, of x.
    """
    if is_batch_invariant():
        residual.add_(linear(x, weight, bias, weight_scale))
        return
    product = add_product(residual, x, weight, bias, weight_scale, is_rounded=is_rounded)
    if product is not None:
        residual.add_(product.sum(0) if product.dim() > residual.dim() else product)


@operator(like("residual"), mutates=("residual",))
def linear_residual_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight_scale: torch.Tensor | None = None,
    is_rounded: bool = False,
) -> torch.Tensor:
    """Runs linear_residual; returns rms_norm(residual)."""
    product = add_product(residual, x, weight, bias, weight_scale, is_rounded=is_rounded)
    if product is None:
        return rms_norm(residual, norm_weight, eps)
    return add_rms_norm(product, residual, norm_weight, eps)


@operator(product_like("residual", "next_weight"), mutates=("residual",))
def linear_residual_norm_linear(  # noqa: PLR0913  # an operator takes no dataclasses
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    next_weight: torch.Tensor,
    next_bias: torch.Tensor | None,
    is_gated: bool,
    weight_scale: torch.Tensor | None = None,
    next_weight_scale: torch.Tensor | None = None,
    is_rounded: bool = False,
) -> torch.Tensor:
    """Runs linear_residual; returns norm_linear of the residual with the next weight and bias."""
    product = add_product(residual, x, weight, bias, weight_scale, is_rounded=is_rounded)
    following = (next_weight, next_bias)
    if product is None:
        return norm_linear(residual, norm_weight, eps, *following, is_gated, next_weight_scale)
    return add_norm_linear(
        product, residual, norm_weight, eps, *following, is_gated, next_weight_scale
    )


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    *,
    is_rounded: bool = False,
) -> torch.Tensor | None:
    """Adds x @ weight^T + bias to the residual, or leaves the sum to the next norm.

    Returns:
        None, or what is left to add: the product, perhaps in parts [S, T, N] float32.
    """
    # A kernel that writes the residual while others read x needs two tensors.
    is_apart = x.data_ptr() != residual.data_ptr() and residual.is_contiguous()
    if is_batch_invariant() and residual.is_contiguous() and x.dim() == 2:
        return invariant_addends(x, weight, bias, weight_scale)
    if is_batch_invariant() or not is_apart:
        return linear(x, weight, bias, weight_scale, is_rounded)
    if weight_scale is not None and leaves_rounded(x, may_round=is_rounded):
        return product_of_stored(x, weight, bias, weight_scale, may_split=True)
    tiles = tiles_of_few_tokens(x, weight, bias, weight_scale, is_gated=False)
    # Imported on first use: a CPU installation has no Triton.
    if isinstance(tiles, VectorTiles):
        from models.kernels.products.vector_linear import vector_linear

        vector_linear(
            x, weight, bias, tiles, weight_scale=weight_scale, residual=residual, output=residual
        )
        return None
    if tiles is not None:
        from models.kernels.products.matrix_linear import matrix_linear

        return matrix_linear(x, weight, bias, tiles, weight_scale=weight_scale)
    wide = tiles_of_many_tokens(x, weight, bias, is_gated=False)
    if wide is not None:
        from models.kernels.products.wide_linear import wide_linear

        return wide_linear(x, weight, wide)
    if weight_scale is not None and rounds_in_norm(x, weight_scale):
        return rounded_product(x, weight, bias, weight_scale, may_split=True)
    is_long = has_kernels(x.device) and x.dim() == 2 and x.shape[0] >= _MANY_TOKENS
    if is_long and bias is None and weight_scale is None:
        residual.addmm_(x, weight.t())
        return None
    return linear(x, weight, bias, weight_scale)
