"""LayerNorm, with the residual sum before it in the same kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, normed_ptr, sum_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalises one row, or its sum with the residual's row unless residual_ptr is None."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + at, mask=is_column, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, x, mask=is_column)
    values = x.to(tl.float32)
    centred = tl.where(is_column, values - tl.sum(values, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = (centred * scale * weight + bias).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + at, normed, mask=is_column)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Runs models.ops.elementwise.layer_norm.layer_norm."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), None, weight, bias, eps, normed, None)
    return normed


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs models.ops.elementwise.layer_norm.add_layer_norm."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x.contiguous(), residual.contiguous(), weight, bias, eps, normed, total)
    return total, normed


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    """Runs one program per row."""
    num_rows, size = x.shape
    if num_rows:
        launch = _launcher(size, x.device)
        launch((num_rows, 1, 1), x, residual, weight, bias, normed, total, eps)


@lru_cache
def _launcher(size: int, device: torch.device) -> Launch:
    del device  # each has its own builds
    block = triton.next_power_of_2(size)
    num_warps = min(16, max(1, block // 256))
    return Launch(_layer_norm_kernel, SIZE=size, BLOCK=block, num_warps=num_warps)
