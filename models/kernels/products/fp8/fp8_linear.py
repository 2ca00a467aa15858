"""FP8 products with a scale per block of weights, and the rounding of activations before them."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.tuning.registry import tables_on
from models.kernels.tuning.table import row_of
from models.kernels.tuning.tiles import BlockTiles
from models.number_formats import BLOCK, FP8, FP8_MAX, SMALLEST_AMAX
from models.operands.token_scales import empty_token_scales

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
GROUPS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["num_groups", "row_stride", "group_stride"])
def _quantize_kernel(
    x_ptr, rounded_ptr, scale_ptr, num_groups, row_stride, group_stride,
    SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, GROUP_BLOCK)
    columns = groups[:, None] * GROUP_SIZE + inside[None, :]
    is_column = (columns < SIZE) & (inside[None, :] < GROUP_SIZE)
    x = tl.load(x_ptr + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), _SMALLEST_AMAX) / _FP8_MAX
    scaled = tl.minimum(tl.maximum(x / scale[:, None], -_FP8_MAX), _FP8_MAX)
    rounded = scaled.to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + row * SIZE + columns, rounded, mask=is_column)
    at_scale = row * row_stride + groups.to(tl.int64) * group_stride
    tl.store(scale_ptr + at_scale, scale, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_rows", "row_stride", "block_stride"])
def _block_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, output_ptr, num_rows,
    row_stride, block_stride,
    NUM_COLUMNS: tl.constexpr, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes one tile of the output, looping over blocks of the weight's columns."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < NUM_COLUMNS
    num_blocks: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    x_at = x_ptr + rows.to(tl.int64)[:, None] * SIZE + inner[None, :]
    weight_at = weight_ptr + columns.to(tl.int64)[None, :] * SIZE + inner[:, None]
    x_scale_at = x_scale_ptr + rows.to(tl.int64) * row_stride
    weight_scale_at = weight_scale_ptr + (columns // BLOCK_K) * num_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(num_blocks):
        start = block * BLOCK_K
        if SIZE % BLOCK_K == 0:
            x = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_at + start, mask=is_column[None, :], other=0.0)
        else:
            is_inner = start + inner < SIZE
            x = tl.load(x_at + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            weight = tl.load(
                weight_at + start, mask=is_column[None, :] & is_inner[:, None], other=0.0
            )
        x_scale = tl.load(x_scale_at + block * block_stride, mask=is_row, other=0.0)
        weight_scale = tl.load(weight_scale_at + block, mask=is_column, other=0.0)
        # One sum per block: tensor cores add FP8 products in fewer than 32 bits.
        total += tl.dot(x, weight) * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    output_at = output_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    tl.store(output_at, total.to(output_ptr.dtype.element_ty), mask=is_inside)


def quantize(
    x: torch.Tensor, group_size: int, *, is_transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K] to FP8; see models.ops.products.fp8_linear.quantize.

    is_transposed: the scales are those of empty_token_scales.
    """
    x = x.contiguous()
    num_rows, size = x.shape
    num_groups = triton.cdiv(size, group_size)
    rounded = torch.empty(x.shape, dtype=FP8, device=x.device)
    if is_transposed:
        scale = empty_token_scales(num_rows, num_groups, x.device)
    else:
        scale = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    groups = min(GROUPS_PER_PROGRAM, triton.next_power_of_2(num_groups))
    group_block = triton.next_power_of_2(group_size)
    _quantize_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        x, rounded, scale, num_groups, *scale.stride(),
        SIZE=size, GROUP_SIZE=group_size, GROUP_BLOCK=group_block, GROUPS=groups,
        num_warps=min(16, max(1, group_block * groups // 512)), **launch_options(x.device),
    )  # fmt: skip
    return rounded, scale


def fp8_block_linear(
    rounded: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the product of activations that are rounded by blocks, [T, N] of `dtype`."""
    (num_rows, size), num_columns = rounded.shape, weight.shape[0]
    output = torch.empty((num_rows, num_columns), dtype=dtype, device=rounded.device)
    grid, tiles = _grid(num_rows, num_columns, rounded.device)
    _block_linear_kernel[grid](
        rounded, scale, weight, weight_scale, weight if bias is None else bias, output, num_rows,
        *scale.stride(), NUM_COLUMNS=num_columns, SIZE=size, HAS_BIAS=bias is not None,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=BLOCK,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return output


@lru_cache(maxsize=1024)
def _grid(
    num_rows: int, num_columns: int, device: torch.device
) -> tuple[tuple[int, int], BlockTiles]:
    tiles = _tile(num_rows, device)
    return (-(-num_rows // tiles.rows), -(-num_columns // tiles.columns)), tiles


def _tile(num_rows: int, device: torch.device) -> BlockTiles:
    """Returns the tiles of fp8_block_linear.

    With few rows the product is bound by reading weights: narrow tiles make enough programs to keep
    every multiprocessor reading.
    """
    return row_of(tables_on(device).fp8_blocks, num_rows)
