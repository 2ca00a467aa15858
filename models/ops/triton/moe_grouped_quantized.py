"""Experts for many tokens whose weights stay in 8 or 4 bits; see moe_grouped for the rest.

Weights become numbers of the activations' dtype on the way into the tensor cores, so that results
are those of dequantised weights and memory is read for the stored ones.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from models.ops.expert_forms import tile_rows
from models.ops.experts import ExpertWeights
from models.ops.triton.expert_formats import NAMES, row_product
from models.ops.triton.moe_grouped import place, sum_by_token
from models.ops.triton.moe_routing import sort_by_expert
from models.ops.triton.swiglu import gated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Shape of one program: rows of x, rows of the weight, warps, depth of the pipeline."""

    rows: int
    weight_rows: int
    num_warps: int
    num_stages: int


_DEPTH = 128
_HALF_TILES = {
    16: _Tiles(rows=16, weight_rows=64, num_warps=4, num_stages=4),
    64: _Tiles(rows=64, weight_rows=128, num_warps=8, num_stages=3),
    128: _Tiles(rows=128, weight_rows=128, num_warps=8, num_stages=3),
}
"""By rows of a tile, for activations of two bytes."""

_FLOAT_TILES = _Tiles(rows=16, weight_rows=32, num_warps=4, num_stages=2)


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CLAMPED: tl.constexpr, ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Computes a tile of gated inner features of one expert."""
    expert, first_row, end = place(tl.program_id(1), starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E)
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0).to(tl.int64)
    # Gate and up of a feature stand side by side in one tile, so that x is read for both at once.
    COLUMNS: tl.constexpr = WEIGHT_ROWS // 2
    places = tl.arange(0, WEIGHT_ROWS)
    features = tl.program_id(0) * COLUMNS + places // 2
    weight_rows = places % 2 * INNER + features
    is_feature = features < INNER
    acc = row_product(
        x_ptr + pairs // TOP_K * HIDDEN, is_row, weight_ptr, scale_ptr, expert, 2 * INNER, 2,
        weight_rows, is_feature, HIDDEN, ROWS, WEIGHT_ROWS, DEPTH, FORMAT,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * 2 * INNER + weight_rows, mask=is_feature, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    gate, up = acc.reshape(COLUMNS, 2, ROWS).permute(0, 2, 1).split()
    result = gated(gate, up, alpha, limit, IS_CLAMPED)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = pairs[None, :] * INNER + columns[:, None]
    in_output = is_row[None, :] & (columns < INNER)[:, None]
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=in_output)


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Computes a tile of output features of one expert, not yet weighted."""
    expert, first_row, end = place(tl.program_id(1), starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E)
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0).to(tl.int64)
    columns = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
    is_column = columns < HIDDEN
    acc = row_product(
        x_ptr + pairs * INNER, is_row, weight_ptr, scale_ptr, expert, HIDDEN, 1,
        columns, is_column, INNER, ROWS, WEIGHT_ROWS, DEPTH, FORMAT,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    at = pairs[None, :] * HIDDEN + columns[:, None]
    in_output = is_row[None, :] & is_column[:, None]
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=in_output)


def apply_grouped_quantized(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Does what models.ops.triton.moe.apply_experts says; hidden is contiguous."""
    hidden_size, inner = hidden.shape[1], experts.inner_size
    num_experts, num_pairs = len(experts.down), ids.numel()
    tiles = _FLOAT_TILES
    if hidden.dtype.itemsize == 2:  # a half takes two bytes
        tiles = _HALF_TILES[tile_rows(num_pairs, num_experts)]
    pairs, starts = sort_by_expert(ids, num_experts)
    between = hidden.new_empty(num_pairs, inner)
    results = hidden.new_empty(num_pairs, hidden_size)
    num_tiles = num_pairs // tiles.rows + num_experts
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "NUM_EXPERTS": num_experts, "ROWS": tiles.rows,
        "WEIGHT_ROWS": tiles.weight_rows, "DEPTH": _DEPTH,
        "BLOCK_E": triton.next_power_of_2(num_experts), "FORMAT": format_name(experts),
        "HAS_BIAS": experts.gate_up_bias is not None,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    # Without biases the kernels do not touch them; any tensor will do.
    gate_up_bias, down_bias = experts.gate_up_bias, experts.down_bias
    if gate_up_bias is None or down_bias is None:
        gate_up_bias = down_bias = weights
    _gate_up_kernel[(triton.cdiv(2 * inner, tiles.weight_rows), num_tiles)](
        hidden, experts.gate_up, experts.gate_up_scale, gate_up_bias, pairs, starts, between,
        experts.alpha, experts.limit or 0.0,
        TOP_K=ids.shape[1], IS_CLAMPED=experts.limit is not None, **shape,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden_size, tiles.weight_rows), num_tiles)](
        between, experts.down, experts.down_scale, down_bias, pairs, starts, results, **shape
    )
    return sum_by_token(results, weights)


def format_name(experts: ExpertWeights) -> str:
    """Returns what the kernels call the format of quantised experts."""
    return NAMES[str(experts.down.dtype).removeprefix("torch.")]
