"""Rows of tokens in FP8, in the order of experts, and where their scales are.

The copy engine takes scales from every fourth on, so those of an expert, or of a row computed
alone, begin at a multiple of four; rows themselves are side by side.
"""

import torch
import triton
import triton.language as tl

from models.kernels.experts.fp8.rounding import rounded
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.number_formats import BLOCK, FP8
from models.operands.token_scales import TOKEN_ALIGNMENT

_BLOCK = tl.constexpr(BLOCK)
_ALIGNMENT = tl.constexpr(TOKEN_ALIGNMENT)


@triton.jit
def scale_row(row, start, expert, IS_ALONE: tl.constexpr):
    """Returns where the scales of a row are, whose expert's first row is `start`."""
    if IS_ALONE:
        return row * _ALIGNMENT
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        first = (start + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return row - start + first + expert * _ALIGNMENT


@triton.jit(do_not_specialize=["scale_stride"])
def _round_kernel(
    x_ptr, experts_ptr, starts_ptr, rows_ptr, rounded_ptr, scale_ptr, scale_stride,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, IS_ALONE: tl.constexpr,
    BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rounds a token, in BLOCKS runs of features, to the rows of its experts."""
    wait_for_previous(DEPENDENT)
    # Only now, so that later kernels may read the order of rows before their own waits.
    let_next_start(DEPENDENT)
    token = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    columns = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_column = columns < SIZE
    x_ptr += token.to(tl.int64) * SIZE
    values, scale = rounded(tl.load(x_ptr + columns, mask=is_column, other=0.0))
    scale_ptr += blocks.to(tl.int64) * scale_stride
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair)
        is_here = expert < NUM_EXPERTS
        row, start = pair, 0
        if not IS_ALONE:
            row = tl.load(rows_ptr + pair, mask=is_here, other=0)
            start = tl.load(starts_ptr + expert, mask=is_here, other=0)
        at_row = rounded_ptr + row.to(tl.int64) * SIZE
        tl.store(at_row + columns, values, mask=is_column & is_here)
        at_scales = scale_ptr + scale_row(row, start, expert, IS_ALONE)
        tl.store(at_scales, scale, mask=(blocks * _BLOCK < SIZE) & is_here)


def empty_row_scales(rows: torch.Tensor, num_experts: int, *, is_alone: bool) -> torch.Tensor:
    """Returns room for scales of rows [R, size], [blocks, scale_row] float32."""
    (num_rows, size), device = rows.shape, rows.device
    most = num_rows if is_alone else -(-num_rows // TOKEN_ALIGNMENT) + num_experts + 1
    most *= TOKEN_ALIGNMENT
    return torch.empty(triton.cdiv(size, BLOCK), most, dtype=torch.float32, device=device)


def rounded_rows(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    num_experts: int,
    *,
    is_alone: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what fp8_linear.quantize makes of each row's token, [T * top_k, H], and its scales.

    ids: [T, top_k]; pairs of other experts than the first num_experts are left out.
    starts, rows: of sort_by_expert; is_alone: a row is a pair.
    """
    (num_tokens, size), top_k = hidden.shape, ids.shape[1]
    x = torch.empty(num_tokens * top_k, size, dtype=FP8, device=hidden.device)
    scale = empty_row_scales(x, num_experts, is_alone=is_alone)
    blocks = triton.next_power_of_2(triton.cdiv(size, BLOCK))
    _round_kernel[(num_tokens,)](
        hidden, ids, starts, rows, x, scale, scale.stride(0), SIZE=size, TOP_K=top_k,
        NUM_EXPERTS=num_experts, IS_ALONE=is_alone, BLOCKS=blocks,
        num_warps=min(16, max(1, blocks // 4)), **launch_options(hidden.device),
    )  # fmt: skip
    return x, scale
