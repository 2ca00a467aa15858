"""Matrix products whose rows do not depend on the number of tokens: see batch_invariance."""

import torch

from models.batch_invariance import row_wise
from models.kernels.gpu import has_kernels, is_hopper
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.products.fp8.fp8_configurations import fp8_tiles
from models.kernels.products.linear_configurations import (
    MOST_TOKENS,
    invariant_matrix_tiles,
    invariant_splits,
)
from models.kernels.products.wide_configurations import invariant_wide_tiles
from models.number_formats import BLOCK
from models.operands.weight_scales import is_by_block
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.fp8_linear import plain_product, product_of_rounded, rounded_for


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Runs models.ops.products.linear.linear; each row's sum has one order for a weight's shape.

    On a GPU any number of tokens is rounded to FP8 for an FP8 weight.
    """
    if not has_kernels(x.device):
        return row_wise(lambda row: plain_product(row, weight, bias, weight_scale), x)
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.sum_parts import sum_parts

    tokens = x.reshape(-1, x.shape[-1])
    output = _product(tokens, weight, weight_scale)
    if output.dim() > tokens.dim():
        output = sum_parts(output, x.dtype)
    output = output.view(*x.shape[:-1], weight.shape[0])
    # Only one of the kernels takes a bias; added here, it is added to the same rounded sums.
    return output if bias is None else output.add_(bias)


def invariant_addends(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Returns invariant_linear's product [T, N], or its addends in order, [S, T, N] float32.

    add_rms_norm adds them up and rounds as invariant_linear does. x is [T, K].
    """
    if bias is not None or not has_kernels(x.device):
        return invariant_linear(x, weight, bias, weight_scale)
    return _product(x, weight, weight_scale)


def invariant_gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Returns silu_and_mul of invariant_linear, in one kernel on Hopper's tensor cores."""
    num_rows, num_inputs = weight.shape
    is_fused = (
        bias is None
        and weight_scale is None
        and x.dim() == 2
        and has_kernels(x.device)
        and _fits_tensor_cores(x, weight)
        and num_rows // 2 * x.itemsize % COPY_ALIGNMENT == 0
        and invariant_splits(num_rows, num_inputs) == 1
    )
    if not is_fused:
        return silu_and_mul(invariant_linear(x, weight, bias, weight_scale))
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.matrix_linear import matrix_linear
    from models.kernels.products.wide_linear import wide_linear

    x = x.contiguous()
    if len(x) <= MOST_TOKENS:
        few = invariant_matrix_tiles(len(x), num_rows, num_inputs, is_gated=True)
        return matrix_linear(x, weight, None, few, is_gated=True, rounds=True)
    tiles = invariant_wide_tiles(len(x), num_rows, 1, device=x.device)
    return wide_linear(x, weight, tiles, is_gated=True, rounds=True)


def _product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None
) -> torch.Tensor:
    """Returns x @ weight^T, [T, N], or its addends in order, [S, T, N] float32."""
    if weight_scale is not None:
        return _fp8_linear(x, weight, weight_scale)
    if _fits_tensor_cores(x, weight):
        return _tensor_core_linear(x, weight)
    return _fixed_linear(x, weight)


def _fp8_linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Multiplies the rounded tokens; unsplit sums are the same bits in all of Hopper's tiles."""
    x = x.contiguous()
    is_blocked = is_by_block(weight, weight_scale)
    if fp8_tiles(len(x), *weight.shape, may_split=False, device=x.device):
        operands = (*rounded_for(x, weight, weight_scale), weight, weight_scale)
        return product_of_rounded(*operands, None, x.dtype)
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.fixed_linear import fixed_linear
    from models.kernels.products.fp8.fp8_linear import quantize

    rounded, scale = quantize(x, BLOCK if is_blocked else x.shape[-1])
    return fixed_linear(
        rounded, weight, x_scale=scale, weight_scale=weight_scale, is_blocked=is_blocked,
        dtype=x.dtype,
    )  # fmt: skip


def _fits_tensor_cores(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether the kernels for Hopper's tensor cores take a product."""
    return (
        x.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and x.shape[1] * x.itemsize % COPY_ALIGNMENT == 0
        and is_hopper(x.device)
    )


def _tensor_core_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies with the weight as left factor, whatever the tile of tokens.

    The inputs' parts are summed apart and added in order.
    """
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.matrix_linear import matrix_linear
    from models.kernels.products.wide_linear import wide_linear

    x = x.contiguous()
    if len(x) <= MOST_TOKENS:
        return matrix_linear(x, weight, None, invariant_matrix_tiles(len(x), *weight.shape))
    parts = invariant_splits(*weight.shape)
    tiles = invariant_wide_tiles(len(x), len(weight), parts, device=x.device)
    return wide_linear(x, weight, tiles)


def _fixed_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from models.kernels.products.fixed_linear import fixed_linear

    return fixed_linear(x.contiguous(), weight.contiguous(), dtype=x.dtype)
