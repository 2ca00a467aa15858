"""RMSNorm, with the residual sum before it in the same kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.ops.triton.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.ops.triton.launching.launch import Launch


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, sum_ptr, eps,
    SIZE: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalises one row, the sum of PARTS rows of x and, if HAS_RESIDUAL, one of the residual.

    Runs of HEADS adjacent rows of x begin every STRIDE elements.
    """
    let_next_start(DEPENDENT)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    row = tl.program_id(0).to(tl.int64)
    at = row * SIZE + columns
    at_x = row // HEADS * STRIDE + row % HEADS * SIZE + columns
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    x = tl.load(x_ptr + at_x, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=is_column, other=0.0)
        total = x.to(tl.float32)
        part_size = tl.num_programs(0).to(tl.int64) * SIZE
        for part in tl.static_range(1, PARTS):
            total += tl.load(x_ptr + part * part_size + at, mask=is_column, other=0.0)
        x = (total + residual.to(tl.float32)).to(residual.dtype)
        tl.store(sum_ptr + at, x, mask=is_column)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(normed_ptr + at, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=is_column)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the normalised x, contiguous; see models.ops.elementwise.rms_norm.

    x may be a slice of wider rows, such as some of the heads of each token.
    """
    if not _is_slice(x):
        x = x.contiguous()
    normed = x.new_empty(x.shape)
    _launch(x, None, weight, eps, normed, normed)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Runs models.ops.elementwise.rms_norm.add_rms_norm; x and residual are contiguous.

    The sum may replace the residual: a thread reads the elements that it writes.
    """
    normed = torch.empty_like(residual)
    _launch(x, residual, weight, eps, normed, residual)
    return normed


def _is_slice(x: torch.Tensor) -> bool:
    """Returns whether x is [T, K] or [T, H, D] and each token's elements are contiguous."""
    if x.dim() == 2:
        return x.stride(1) == 1
    return x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Runs one program per row; with a residual x may be in parts and `total` takes the sum."""
    size = x.shape[-1]
    num_rows = normed.numel() // size
    heads, stride = 1, size
    if not x.is_contiguous():
        heads, stride = x.numel() // (len(x) * size), x.stride(0)
    num_parts = x.numel() // normed.numel()
    launch = _launcher(size, heads, stride, num_parts, residual is not None, x.device)
    launch(
        (num_rows, 1, 1),
        x, x if residual is None else residual, weight, normed, total, eps,
    )  # fmt: skip


@lru_cache
def _launcher(
    size: int, heads: int, stride: int, num_parts: int, has_residual: bool, device: torch.device
) -> Launch:
    block = triton.next_power_of_2(size)
    # A thread reads its eight elements at once: with few rows nothing hides a second read.
    return Launch(
        _rms_norm_kernel, SIZE=size, HEADS=heads, STRIDE=stride, PARTS=num_parts,
        HAS_RESIDUAL=has_residual, BLOCK=block, num_warps=min(16, max(1, block // 256)),
        **launch_options(device),
    )  # fmt: skip
