"""MXFP4 experts on any GPU, for any number of tokens; see moe_grouped for the rest.

Weights are converted to the activations' dtype on the way to the tensor cores: results are those of
dequantised weights, memory traffic is that of the stored ones. In bfloat16 on Hopper
packed_experts has other kernels.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.experts.expert_forms import are_few, tile_rows
from models.kernels.experts.moe_grouped import find_rows, sum_by_token
from models.kernels.experts.moe_routing import sort_by_expert
from models.kernels.experts.packed.expert_formats import mxfp4_product
from models.kernels.experts.pair_order import PairOrder
from models.kernels.experts.swiglu import gated
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.tuning.registry import tables_on
from models.kernels.tuning.tiles import MXFP4Tiles, constants_of
from models.operands.experts import ExpertWeights


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CLAMPED: tl.constexpr, ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    # Only now, so that the next kernel may read the order of rows before its own wait.
    let_next_start(DEPENDENT)
    expert, rows, is_row, pairs = find_rows(
        tl.program_id(1), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    if tl.sum(is_row.to(tl.int32), 0) == 0:
        return
    tokens = (pairs // TOP_K).to(tl.int64)
    # Gate and up of a feature are neighbours in a tile, so that x is read for both at once.
    COLUMNS: tl.constexpr = WEIGHT_ROWS // 2
    slots = tl.arange(0, WEIGHT_ROWS)
    features = tl.program_id(0) * COLUMNS + slots // 2
    weight_rows = slots % 2 * INNER + features
    is_feature = features < INNER
    acc = mxfp4_product(
        x_ptr + tokens * HIDDEN, is_row, weight_ptr, scale_ptr, expert.to(tl.int64), weight_rows,
        (features // 8 * 2 + slots % 2) * 8 + features % 8, is_feature, 2 * INNER, HIDDEN, ROWS,
        WEIGHT_ROWS, DEPTH,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * 2 * INNER + weight_rows, mask=is_feature, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    gate, up = acc.reshape(ROWS, COLUMNS, 2).split()
    result = gated(gate, up, alpha, limit, IS_CLAMPED)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_output = is_row[:, None] & (columns < INNER)[None, :]
    output_ptrs = output_ptr + rows[:, None] * INNER + columns[None, :]
    tl.store(output_ptrs, result.to(output_ptr.dtype.element_ty), mask=in_output)


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    expert, rows, is_row, pairs = find_rows(
        tl.program_id(1), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    if tl.sum(is_row.to(tl.int32), 0) == 0:
        return
    columns = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
    is_column = columns < HIDDEN
    # Scales of matrices that are stacked take turns.
    SIZE: tl.constexpr = HIDDEN // PARTS
    scale_rows = (columns % SIZE // 8 * PARTS + columns // SIZE) * 8 + columns % 8
    wait_for_previous(DEPENDENT)
    acc = mxfp4_product(
        x_ptr + rows * INNER, is_row, weight_ptr, scale_ptr, expert.to(tl.int64), columns,
        scale_rows, is_column, HIDDEN, INNER, ROWS, WEIGHT_ROWS, DEPTH,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    in_output = is_row[:, None] & is_column[None, :]
    output_ptrs = output_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=in_output)


def apply_mxfp4(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does, into `output`; both contiguous."""
    results = _results(hidden, weights, ids, experts)
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def _results(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Returns the results of pairs, not yet weighted, [T * top_k, H]."""
    hidden_size, inner = hidden.shape[1], experts.inner_size
    num_experts, num_choices = len(experts.down), experts.num_choices
    top_k, num_pairs = ids.shape[1], ids.numel()
    is_alone = are_few(num_pairs, num_choices, top_k)
    tiles = _tiles(num_pairs, num_choices, is_alone, hidden.itemsize, hidden.device)
    pairs, starts = (ids, ids)
    if not is_alone:
        pairs, starts = sort_by_expert(ids, num_experts, num_choices)
    between = hidden.new_empty(num_pairs, inner)
    results = hidden.new_empty(num_pairs, hidden_size)
    num_tiles = num_pairs if is_alone else num_pairs // tiles.rows + num_experts
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts), "IS_ALONE": is_alone,
        "HAS_BIAS": experts.gate_up_bias is not None,
        **constants_of(tiles), **launch_options(hidden.device),
    }  # fmt: skip
    gate_up_bias, down_bias = experts.biases_or(weights)
    _gate_up_kernel[(triton.cdiv(2 * inner, tiles.weight_rows), num_tiles)](
        hidden, experts.gate_up.view(torch.int16), experts.gate_up_scale, gate_up_bias, pairs,
        starts, between, experts.alpha, experts.limit or 0.0,
        TOP_K=top_k, IS_CLAMPED=experts.clamp, **shape,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden_size, tiles.weight_rows), num_tiles)](
        between, experts.down.view(torch.int16), experts.down_scale, down_bias, pairs, starts,
        results, PARTS=1, **shape,
    )  # fmt: skip
    return results


def pairs_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    order: PairOrder,
    num_parts: int = 1,
) -> torch.Tensor:
    """Does what models.kernels.experts.packed.matrix_experts.packed_product does, for MXFP4.

    x may have any dtype of activations.
    """
    assert scale is not None, "MXFP4 has scales"
    num_experts, num_outputs = weight.shape[:2]
    tiles = _tiles(order.num_pairs, order.num_choices, order.is_alone, x.itemsize, x.device)
    output = x.new_empty(order.num_pairs, num_outputs)
    _down_kernel[(triton.cdiv(num_outputs, tiles.weight_rows), order.num_tiles(tiles.rows))](
        x, weight.view(torch.int16), scale, scale if bias is None else bias, order.pairs,
        order.starts, output, HIDDEN=num_outputs, INNER=x.shape[1], PARTS=num_parts,
        NUM_EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts),
        HAS_BIAS=bias is not None, IS_ALONE=order.is_alone, **constants_of(tiles),
        **launch_options(x.device),
    )  # fmt: skip
    return output


@lru_cache(maxsize=1024)
def _tiles(
    num_pairs: int, num_choices: int, is_alone: bool, itemsize: int, device: torch.device
) -> MXFP4Tiles:
    tables = tables_on(device)
    if itemsize != 2:
        return tables.mxfp4_experts_float
    if is_alone:
        return tables.mxfp4_experts_alone
    return tables.mxfp4_experts[tile_rows(num_pairs, num_choices)]
