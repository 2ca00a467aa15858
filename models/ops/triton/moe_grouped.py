"""Experts for many tokens: products of the rows that chose an expert with its weights.

Rows are sorted by expert, and each program multiplies one tile of rows of one expert. The grid is
that of the worst case, so that it depends on shapes alone; programs without rows return at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from models.ops.expert_forms import tile_rows
from models.ops.experts import ExpertWeights
from models.ops.triton.moe_routing import sort_by_expert
from models.ops.triton.swiglu import gated

_SUM_COLUMNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Shape of one program: rows, columns and depth of a tile, warps, depth of the pipeline."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


_HALF_TILES = {
    16: _Tiles(rows=16, columns=32, depth=128, num_warps=4, num_stages=4),
    64: _Tiles(rows=64, columns=64, depth=64, num_warps=4, num_stages=3),
    128: _Tiles(rows=128, columns=64, depth=64, num_warps=8, num_stages=3),
}
"""By rows of a tile, for elements of two bytes."""

_FLOAT_TILES = _Tiles(rows=16, columns=32, depth=32, num_warps=4, num_stages=2)


@triton.jit
def place(tile, starts_ptr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns a tile's expert, its first row and the end of the expert's rows.

    Each expert's tiles start at its first row // ROWS + its number: enough for the worst case that
    every expert ends in a tile of one row.
    """
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < NUM_EXPERTS
    first_rows = tl.load(starts_ptr + experts, mask=is_expert, other=0)
    is_before = is_expert & (first_rows // ROWS + experts <= tile)
    expert = tl.sum(is_before.to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    return expert.to(tl.int64), start + (tile - start // ROWS - expert) * ROWS, end


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CLAMPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Computes a tile of gated inner features of one expert."""
    expert, first_row, end = place(tl.program_id(1), starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E)
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    x_ptrs = x_ptr + (pairs // TOP_K)[:, None] * HIDDEN
    gate_ptrs = weight_ptr + (expert * 2 * INNER + columns)[None, :] * HIDDEN
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, HIDDEN, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_depth = depth < HIDDEN
        x = tl.load(x_ptrs + depth[None, :], mask=is_row[:, None] & is_depth[None, :], other=0.0)
        in_tile = is_depth[:, None] & is_column[None, :]
        gate_tile = tl.load(gate_ptrs + depth[:, None], mask=in_tile, other=0.0)
        up_tile = tl.load(gate_ptrs + INNER * HIDDEN + depth[:, None], mask=in_tile, other=0.0)
        gate = tl.dot(x, gate_tile, gate, input_precision="ieee")
        up = tl.dot(x, up_tile, up, input_precision="ieee")
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * 2 * INNER + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + INNER, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, alpha, limit, IS_CLAMPED)
    at = pairs[:, None] * INNER + columns[None, :]
    in_output = is_row[:, None] & is_column[None, :]
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=in_output)


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Computes a tile of output features of one expert, not yet weighted."""
    expert, first_row, end = place(tl.program_id(1), starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E)
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    weight_ptrs = weight_ptr + (expert * HIDDEN + columns)[None, :] * INNER
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, INNER, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_depth = depth < INNER
        x = tl.load(
            x_ptr + pairs[:, None] * INNER + depth[None, :],
            mask=is_row[:, None] & is_depth[None, :],
            other=0.0,
        )
        in_tile = is_depth[:, None] & is_column[None, :]
        weight = tl.load(weight_ptrs + depth[:, None], mask=in_tile, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    at = pairs[:, None] * HIDDEN + columns[None, :]
    in_output = is_row[:, None] & is_column[None, :]
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=in_output)


@triton.jit
def _sum_kernel(
    x_ptr, factors_ptr, output_ptr,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up what one token's experts returned, weighted, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    acc = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        x = tl.load(x_ptr + pair * HIDDEN + columns, mask=is_column, other=0.0)
        acc += x.to(tl.float32) * tl.load(factors_ptr + pair)
    at = token * HIDDEN + columns
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=is_column)


def apply_grouped(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Does what models.ops.triton.moe.apply_experts says; hidden is contiguous."""
    num_experts, hidden_size, inner = experts.down.shape
    top_k, num_pairs = ids.shape[1], ids.numel()
    tiles = _choose_tiles(hidden.dtype, num_pairs, num_experts)
    pairs, starts = sort_by_expert(ids, num_experts)
    between = hidden.new_empty(num_pairs, inner)
    results = hidden.new_empty(num_pairs, hidden_size)
    num_tiles = num_pairs // tiles.rows + num_experts
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "NUM_EXPERTS": num_experts, "ROWS": tiles.rows,
        "DEPTH": tiles.depth, "BLOCK_E": triton.next_power_of_2(num_experts),
        "HAS_BIAS": experts.gate_up_bias is not None,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    # Without biases the kernels do not touch them; any tensor will do.
    gate_up_bias, down_bias = experts.gate_up_bias, experts.down_bias
    if gate_up_bias is None or down_bias is None:
        gate_up_bias = down_bias = weights
    _gate_up_kernel[(triton.cdiv(inner, tiles.columns), num_tiles)](
        hidden, experts.gate_up, gate_up_bias, pairs, starts, between,
        experts.alpha, experts.limit or 0.0,
        TOP_K=top_k, IS_CLAMPED=experts.limit is not None, COLUMNS=tiles.columns, **shape,
    )  # fmt: skip
    # One matrix where there were two: as many numbers in a tile.
    columns = 2 * tiles.columns
    _down_kernel[(triton.cdiv(hidden_size, columns), num_tiles)](
        between, experts.down, down_bias, pairs, starts, results, COLUMNS=columns, **shape
    )
    return sum_by_token(results, weights)


def sum_by_token(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Adds up what each token's experts returned, weighted, in the order of its choices.

    Args:
        results: [T * top_k, H], by token.
        weights: [T, top_k] float32.

    Returns:
        [T, H], dtype of results.
    """
    (num_tokens, top_k), hidden_size = weights.shape, results.shape[1]
    output = results.new_empty(num_tokens, hidden_size)
    block = min(_SUM_COLUMNS, triton.next_power_of_2(hidden_size))
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        results, weights, output, HIDDEN=hidden_size, TOP_K=top_k, COLUMNS=block, num_warps=4
    )
    return output


def _choose_tiles(dtype: torch.dtype, num_pairs: int, num_experts: int) -> _Tiles:
    """Returns the shape of tiles."""
    if dtype.itemsize > 2:  # a half takes two bytes
        return _FLOAT_TILES
    return _HALF_TILES[tile_rows(num_pairs, num_experts)]
