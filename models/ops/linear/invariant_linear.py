"""Matrix products whose rows do not depend on the number of tokens: see batch_invariance."""

import torch
from torch.nn import functional

from models.number_formats import BLOCK
from models.ops.batch_invariance import row_wise
from models.ops.kernel_choice import HOPPER, has_kernels
from models.ops.triton.launching.copy_engine import COPY_ALIGNMENT
from models.ops.triton.linear.linear_configurations import (
    MOST_TOKENS,
    invariant_matrix_tiles,
    invariant_splits,
)
from models.ops.triton.linear.wide_configurations import invariant_wide_tiles


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Runs models.ops.linear.linear.linear; each row's sum has one order for a weight's shape."""
    if not has_kernels(x.device):
        return row_wise(lambda row: functional.linear(row, weight, bias), x)
    tokens = x.reshape(-1, x.shape[-1])
    product = _tensor_core_linear if _fits_tensor_cores(tokens, weight) else _fixed_linear
    output = product(tokens, weight).view(*x.shape[:-1], weight.shape[0])
    # Only one of the kernels takes a bias; added here, it is added to the same rounded sums.
    return output if bias is None else output.add_(bias)


def invariant_fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    is_blocked: bool,
) -> torch.Tensor:
    """Runs octavo::fp8_linear on a GPU."""
    # Imported on first use: a CPU installation has no Triton.
    from models.ops.triton.linear.fixed_linear import fixed_linear
    from models.ops.triton.linear.fp8_linear import quantize

    rounded, scale = quantize(x, BLOCK if is_blocked else x.shape[-1])
    output = fixed_linear(
        rounded, weight, x_scale=scale, weight_scale=weight_scale, is_blocked=is_blocked,
        dtype=x.dtype,
    )  # fmt: skip
    return output if bias is None else output.add_(bias)


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
