"""Rotary position embedding, in one kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch

_PAIRS = 512
"""Least pairs of a program, if there are as many."""

_VARYING = ["num_tokens", "token_stride", "head_stride", "cos_stride", "sin_stride"]


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=_VARYING)
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, output_ptr,
    num_tokens, token_stride, head_stride, cos_stride, sin_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rotates ROWS heads, counted through all tokens, and rounds once."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    HALF: tl.constexpr = HEAD_DIM // 2
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = rows // NUM_HEADS
    heads = rows % NUM_HEADS
    dims = tl.arange(0, BLOCK_HALF)
    in_tile = (tokens < num_tokens)[:, None] & (dims < HALF)[None, :]
    at_x = (tokens * token_stride + heads * head_stride)[:, None] + dims[None, :]
    first = tl.load(x_ptr + at_x, mask=in_tile, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at_x + HALF, mask=in_tile, other=0.0).to(tl.float32)
    at_cos = tokens[:, None] * cos_stride + dims[None, :]
    cos = tl.load(cos_ptr + at_cos, mask=in_tile, other=0.0).to(tl.float32)
    # The table's first half carries the minus sign of the first half's sine.
    at_sin = tokens[:, None] * sin_stride + dims[None, :] + HALF
    sin = tl.load(sin_ptr + at_sin, mask=in_tile, other=0.0).to(tl.float32)
    at_output = rows[:, None] * HEAD_DIM + dims[None, :]
    dtype = output_ptr.dtype.element_ty
    tl.store(output_ptr + at_output, (first * cos - second * sin).to(dtype), mask=in_tile)
    tl.store(output_ptr + at_output + HALF, (second * cos + first * sin).to(dtype), mask=in_tile)


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the heads of x [T, H, D], D even; see models.ops.elementwise.rotary.

    Unlike the reference it rounds once. Elements of a rotation are contiguous.
    """
    num_tokens, num_heads, head_dim = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    output = x.new_empty(x.shape)
    rows, launch = _launcher(num_heads, head_dim, x.device)
    launch(
        (triton.cdiv(num_tokens * num_heads, rows), 1, 1),
        x, cos, signed_sin, output,
        num_tokens, x.stride(0), x.stride(1), cos.stride(0), signed_sin.stride(0),
    )  # fmt: skip
    return output


@lru_cache
def _launcher(num_heads: int, head_dim: int, device: torch.device) -> tuple[int, Launch]:
    block = triton.next_power_of_2(head_dim // 2)
    rows = max(1, _PAIRS // block)
    launch = Launch(
        _rotary_kernel, NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROWS=rows, BLOCK_HALF=block,
        num_warps=4, **launch_options(device),
    )  # fmt: skip
    return rows, launch
