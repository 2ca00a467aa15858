"""Experts for few tokens: each pair of a token and an expert is a matrix times a vector.

The two kernels take as long as reading the weights; a decode step of one request reads each chosen
expert once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from models.kernels.experts.swiglu import gated
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.operands.experts import ExpertWeights

_SHORT_ROW = 2048
_MOST_DEPTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Shape of one program: rows of a matrix, elements of a row read at once, and warps."""

    columns: int
    depth: int
    num_warps: int


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, experts_ptr, output_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr, NUM_LOCAL: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS gated inner features of one pair.

    NUM_LOCAL: the number of experts, if some that are chosen are not here; else 0.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    # Pairs are the first dimension: pairs of one expert read the same weights at the same time.
    pair = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if NUM_LOCAL and expert >= NUM_LOCAL:
        return
    x_ptr += (pair // TOP_K).to(tl.int64) * HIDDEN
    gate_ptrs = weight_ptr + (expert * 2 * INNER + columns)[:, None] * HIDDEN
    gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in tl.static_range(0, HIDDEN, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_depth = depth < HIDDEN
        in_tile = is_column[:, None] & is_depth[None, :]
        gate_tile = tl.load(gate_ptrs + depth[None, :], mask=in_tile, other=0.0)
        up_tile = tl.load(gate_ptrs + INNER * HIDDEN + depth[None, :], mask=in_tile, other=0.0)
        x = tl.load(x_ptr + depth, mask=is_depth, other=0.0).to(tl.float32)[None, :]
        gate += gate_tile.to(tl.float32) * x
        up += up_tile.to(tl.float32) * x
    gate = tl.sum(gate, 1)
    up = tl.sum(up, 1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * 2 * INNER + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(bias_ptrs + INNER, mask=is_column, other=0.0).to(tl.float32)
    result = gated(gate, up, alpha, limit, IS_CLAMPED)
    at = pair.to(tl.int64) * INNER + columns
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, bias_ptr, experts_ptr, factors_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_LOCAL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS output features of one token, summed over its experts."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([COLUMNS, DEPTH], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    # Unrolled, here and above, so that many reads run at once.
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        factor = tl.load(factors_ptr + pair)
        is_here = expert < NUM_LOCAL if NUM_LOCAL else True
        weight_ptrs = weight_ptr + (expert * HIDDEN + columns)[:, None] * INNER
        for first in tl.static_range(0, INNER, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            is_depth = (depth < INNER) & is_here
            in_tile = is_column[:, None] & is_depth[None, :]
            weight = tl.load(weight_ptrs + depth[None, :], mask=in_tile, other=0.0)
            x = tl.load(x_ptr + pair * INNER + depth, mask=is_depth, other=0.0).to(tl.float32)
            acc += weight.to(tl.float32) * (x * factor)[None, :]
        if HAS_BIAS:
            in_bias = is_column & is_here
            bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=in_bias, other=0.0)
            biases += bias.to(tl.float32) * factor
    result = tl.sum(acc, 1) + biases
    at = token * HIDDEN + columns
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=is_column)


def apply_pairs(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does, into `output`; both contiguous."""
    num_tokens, hidden_size = hidden.shape
    top_k, inner = ids.shape[1], experts.down.shape[2]
    num_pairs = ids.numel()
    between = hidden.new_empty(num_pairs, inner)
    has_bias = experts.gate_up_bias is not None
    gate_up_bias, down_bias = experts.biases_or(weights)
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "TOP_K": top_k, "HAS_BIAS": has_bias,
        "NUM_LOCAL": len(experts.down) if experts.is_partial else 0,
        **launch_options(hidden.device),
    }  # fmt: skip
    tiles = _tiles(hidden_size, hidden.dtype)
    _gate_up_kernel[(num_pairs, triton.cdiv(inner, tiles.columns))](
        hidden, experts.gate_up, gate_up_bias, ids, between, experts.alpha, experts.limit or 0.0,
        IS_CLAMPED=experts.clamp, **_constants(tiles), **shape,
    )  # fmt: skip
    tiles = _tiles(inner, hidden.dtype)
    _down_kernel[(num_tokens, triton.cdiv(hidden_size, tiles.columns))](
        between, experts.down, down_bias, ids, weights, output, **_constants(tiles), **shape
    )


def _constants(tiles: _Tiles) -> dict[str, int]:
    return {"COLUMNS": tiles.columns, "DEPTH": tiles.depth, "num_warps": tiles.num_warps}


def _tiles(size: int, dtype: torch.dtype) -> _Tiles:
    """Returns the tiles for a matrix with rows of `size` elements.

    Short rows need small programs: with Qwen3-30B-A3B and one token, rows of 768 took 8.7 us
    instead of 10.8 with four rows at a time, 256 elements of each (H200, 2026-11). Long rows are
    read in a power of two that divides them, if it is wide. Each thread reads 16 bytes at a time.
    """
    if size <= _SHORT_ROW and dtype.itemsize == 2:
        depth = _SHORT_ROW // 2 if size % (_SHORT_ROW // 2) == 0 else _SHORT_ROW // 4
        return _Tiles(columns=2, depth=depth, num_warps=2)
    most = _MOST_DEPTH * 2 // dtype.itemsize
    divisor = size & -size
    depth = min(most, divisor if divisor >= most // 8 else triton.next_power_of_2(size))
    return _Tiles(columns=4, depth=depth, num_warps=4)
