"""The gate of a SwiGLU feed-forward layer, with the rounding to FP8 after it in the same kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.elementwise.rms_norm import store_rounded
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.number_formats import BLOCK, FP8
from models.operands.token_scales import empty_token_scales

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, output_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + columns, mask=is_column, other=0.0)
    gated = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(
        output_ptr + row * SIZE + columns, gated.to(output_ptr.dtype.element_ty), mask=is_column
    )


@triton.jit
def _rounded_kernel(
    x_ptr, rounded_ptr, scale_ptr,
    SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gates one row, rounds it to x's dtype, then to FP8 with a scale for each GROUP columns."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + columns, mask=is_column, other=0.0)
    gated = gate * tl.sigmoid(gate) * up.to(tl.float32)
    gated = gated.to(x_ptr.dtype.element_ty).to(tl.float32)
    num_rows = tl.num_programs(0)
    store_rounded(gated, rounded_ptr, scale_ptr, row, num_rows, is_column, SIZE, GROUP, BLOCK)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Maps [..., 2 * I], contiguous, to [..., I]; see models.ops.elementwise.silu_and_mul."""
    size = x.shape[-1] // 2
    output = x.new_empty(*x.shape[:-1], size)
    num_blocks, launch = _launcher(size, x.device)
    launch((output.numel() // size, num_blocks, 1), x, output)
    return output


def rounded_silu_and_mul(x: torch.Tensor, *, is_blocked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what fp8_linear.quantize makes of silu_and_mul(x): [T, I] FP8 and their scales.

    x: [T, 2 * I], contiguous.
    is_blocked: whether each 128 features of a token have a scale, or the token has one.
    """
    num_rows, size = x.shape[0], x.shape[1] // 2
    num_groups = triton.cdiv(size, BLOCK) if is_blocked else 1
    rounded = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scale = empty_token_scales(num_rows, num_groups, x.device)
    launch = _rounded_launcher(size, BLOCK if is_blocked else size, x.device)
    launch((num_rows, 1, 1), x, rounded, scale)
    return rounded, scale


@lru_cache
def _rounded_launcher(size: int, group: int, device: torch.device) -> Launch:
    block = triton.next_power_of_2(size)
    return Launch(
        _rounded_kernel, SIZE=size, GROUP=group, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **launch_options(device),
    )  # fmt: skip


@lru_cache
def _launcher(size: int, device: torch.device) -> tuple[int, Launch]:
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch = Launch(
        _silu_and_mul_kernel, SIZE=size, BLOCK=block, num_warps=max(1, block // 256),
        **launch_options(device),
    )  # fmt: skip
    return triton.cdiv(size, block), launch
