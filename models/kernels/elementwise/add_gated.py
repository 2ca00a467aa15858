"""Adds values that a gate of each token scales, in one launch with the gate's product."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import launch_options, let_next_start
from models.kernels.launching.launch import Launch


@triton.jit(do_not_specialize=["x_stride"])
def _add_gated_kernel(
    sum_ptr, values_ptr, x_ptr, weight_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does a row; rounds where the product, the sigmoid and the factor of a model do.

    It may follow kernels of two streams, so it begins after all of them and only lets the next one
    start.
    """
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    dtype = sum_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(values_ptr + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(sum_ptr + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    logit = tl.sum(x * weight, 0).to(dtype).to(tl.float32)
    factor = tl.sigmoid(logit).to(dtype).to(tl.float32)
    total += (values * factor).to(dtype).to(tl.float32)
    tl.store(sum_ptr + row * SIZE + column, total.to(dtype), mask=mask)


def add_gated(
    total: torch.Tensor, values: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> None:
    """Adds sigmoid(x @ weight^T) * values to `total`, in place.

    Args:
        total: [T, K], contiguous.
        values: [T, K], contiguous.
        x: [T, K]; rows may be apart.
        weight: [1, K], contiguous.
    """
    num_rows, size = total.shape
    _launcher(size, total.device)((num_rows, 1, 1), total, values, x, weight, x.stride(0))


@lru_cache
def _launcher(size: int, device: torch.device) -> Launch:
    block = triton.next_power_of_2(size)
    return Launch(
        _add_gated_kernel, SIZE=size, BLOCK=block, DEPENDENT=launch_options(device)["DEPENDENT"],
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
