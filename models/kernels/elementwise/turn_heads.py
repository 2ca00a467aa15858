"""Rotation of heads by cosines and sines of each row."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch


@triton.jit
def _turn_heads_kernel(
    x_ptr, rotation_ptr, output_ptr, stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one row: the halves of a head are the coordinates of its pairs."""
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK)[None, :]
    is_pair = pairs < HALF
    in_row = (heads < HEADS) & is_pair
    at = heads * HEAD_DIM + pairs
    x_ptr += row * stride
    first = tl.load(x_ptr + at, mask=in_row, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + at, mask=in_row, other=0.0).to(tl.float32)
    cos_ptr = rotation_ptr + row * 2 * HEAD_DIM + pairs
    sin_ptr = cos_ptr + HEAD_DIM
    cos = tl.load(cos_ptr, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr, mask=is_pair, other=0.0)
    turned = first * cos - second * sin
    output_ptr += row * HEADS * HEAD_DIM
    tl.store(output_ptr + at, turned.to(output_ptr.dtype.element_ty), mask=in_row)
    cos = tl.load(cos_ptr + HALF, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + HALF, mask=is_pair, other=0.0)
    turned = second * cos + first * sin
    tl.store(output_ptr + HALF + at, turned.to(output_ptr.dtype.element_ty), mask=in_row)


def turn_heads(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Runs models.ops.elementwise.turn_heads.turn_heads."""
    num_rows, num_heads, head_dim = x.shape
    if x.stride()[1:] != (head_dim, 1):
        x = x.contiguous()
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        launch = _launcher(num_heads, head_dim, x.device)
        launch((num_rows, 1, 1), x, rotation.contiguous(), output, x.stride(0))
    return output


@lru_cache
def _launcher(num_heads: int, head_dim: int, device: torch.device) -> Launch:
    del device  # each has its own builds
    return Launch(
        _turn_heads_kernel, HEADS=num_heads, HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip
