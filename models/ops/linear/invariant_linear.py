"""Matrix products whose rows do not depend on the number of tokens: see batch_invariance."""

import torch

from models.number_formats import BLOCK
from models.ops.batch_invariance import row_wise
from models.ops.kernel_choice import HOPPER, has_kernels
from models.ops.linear.fp8_linear import plain_product, product_of_rounded, rounded_for
from models.ops.operands.weight_scales import is_by_block
from models.ops.triton.launching.copy_engine import COPY_ALIGNMENT
from models.ops.triton.linear.fp8_configurations import fp8_tiles
from models.ops.triton.linear.linear_configurations import (
    MOST_TOKENS,
    invariant_matrix_tiles,
    invariant_splits,
)
from models.ops.triton.linear.wide_configurations import invariant_wide_tiles


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Runs models.ops.linear.linear.linear; each row's sum has one order for a weight's shape.

    On a GPU any number of tokens is rounded to FP8 for an FP8 weight.
    """
    if not has_kernels(x.device):
        return row_wise(lambda row: plain_product(row, weight, bias, weight_scale), x)
    tokens = x.reshape(-1, x.shape[-1])
    if weight_scale is not None:
        output = _fp8_linear(tokens, weight, weight_scale)
    elif _fits_tensor_cores(tokens, weight):
        output = _tensor_core_linear(tokens, weight)
    else:
        output = _fixed_linear(tokens, weight)
    output = output.view(*x.shape[:-1], weight.shape[0])
    # Only one of the kernels takes a bias; added here, it is added to the same rounded sums.
    return output if bias is None else output.add_(bias)


def _fp8_linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Multiplies the rounded tokens; unsplit sums are the same bits in all of Hopper's tiles."""
    x = x.contiguous()
    is_blocked = is_by_block(weight, weight_scale)
    if fp8_tiles(len(x), *weight.shape, is_blocked=is_blocked, may_split=False, device=x.device):
        operands = (*rounded_for(x, weight, weight_scale), weight, weight_scale)
        return product_of_rounded(*operands, None, x.dtype)
    # Imported on first use: a CPU installation has no Triton.
    from models.ops.triton.linear.fixed_linear import fixed_linear
    from models.ops.triton.linear.fp8_linear import quantize

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
        and torch.cuda.get_device_capability(x.device) == HOPPER
    )


def _tensor_core_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies with the weight as left factor, whatever the tile of tokens.

    The inputs' parts are summed apart and added in order.
    """
    # Imported on first use: a CPU installation has no Triton.
    from models.ops.triton.linear.matrix_linear import matrix_linear
    from models.ops.triton.linear.sum_parts import sum_parts
    from models.ops.triton.linear.wide_linear import wide_linear

    x = x.contiguous()
    if len(x) <= MOST_TOKENS:
        output = matrix_linear(x, weight, None, invariant_matrix_tiles(len(x), *weight.shape))
    else:
        splits = invariant_splits(*weight.shape)
        output = wide_linear(x, weight, invariant_wide_tiles(len(x), splits))
    return output if output.dim() == x.dim() else sum_parts(output, x.dtype)


def _fixed_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from models.ops.triton.linear.fixed_linear import fixed_linear

    return fixed_linear(x.contiguous(), weight.contiguous(), dtype=x.dtype)
