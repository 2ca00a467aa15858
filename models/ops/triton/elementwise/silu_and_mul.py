"""The gate of a SwiGLU feed-forward layer, in one kernel."""

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


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Maps [..., 2 * I], contiguous, to [..., I]; see models.ops.elementwise.silu_and_mul."""
    size = x.shape[-1] // 2
    output = x.new_empty(*x.shape[:-1], size)
    num_blocks, launch = _launcher(size, x.device)
    launch((output.numel() // size, num_blocks, 1), x, output)
    return output


@lru_cache
def _launcher(size: int, device: torch.device) -> tuple[int, Launch]:
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch = Launch(
        _silu_and_mul_kernel, SIZE=size, BLOCK=block, num_warps=max(1, block // 256),
        **launch_options(device),
    )  # fmt: skip
    return triton.cdiv(size, block), launch
