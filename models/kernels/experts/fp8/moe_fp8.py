"""FP8 experts, for any number of tokens; see moe_grouped for the rest.

Activations are rounded before both products as in linear layers, with one scale per row and 128
features. Between the products a kernel does so: the first one where its tiles hold such runs of
features whole, else the second one, which rounds what it reads; the bits are the same. Sums of 128
products are added in float32: tensor cores add FP8 products in fewer bits.

In batch-invariant mode all tiles have 64 rows or more. Hopper multiplies these with one kind of
instruction, which adds 32 products at a time whatever the tile; fewer rows take another kind.
"""

from functools import lru_cache
from math import inf

import torch
import triton
import triton.language as tl

from models.batch_invariance import is_batch_invariant
from models.kernels.experts.expert_forms import are_few, tile_rows
from models.kernels.experts.fp8.rounding import rounded
from models.kernels.experts.moe_grouped import find_rows, sum_by_token
from models.kernels.experts.moe_routing import sort_by_expert
from models.kernels.experts.pair_order import PairOrder
from models.kernels.experts.swiglu import gated
from models.kernels.gpu import gpu_of
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.products.fp8.fp8_linear import quantize
from models.kernels.tuning.registry import tables_on
from models.kernels.tuning.table import row_of
from models.kernels.tuning.tiles import FP8ExpertTiles, constants_of
from models.number_formats import BLOCK, FP8
from models.operands.experts import ExpertWeights

_FP8_BLOCK = tl.constexpr(BLOCK)
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


_INVARIANT_ROWS = 64
"""Least rows of a tile in batch-invariant mode."""


@triton.jit
def _with_block(acc, x, weight_ptrs, in_weight, x_scale, scale_ptr, BY_ROW: tl.constexpr):
    """Adds rows of x times a block of columns, with the block's scales, to acc.

    fma leaves the compiler no choice of rounding.
    """
    weight = tl.load(weight_ptrs, mask=in_weight, other=0.0)
    if not BY_ROW:
        x_scale *= tl.load(scale_ptr)
    return tl.fma(tl.dot(x, weight), tl.broadcast_to(x_scale[:, None], acc.shape), acc)


@triton.jit
def _finished(
    acc, scale_ptr, bias_ptr, at, is_column, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr
):
    if BY_ROW:
        acc *= tl.load(scale_ptr + at, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr,
    output_scale_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CLAMPED: tl.constexpr, BY_ROW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr,
    IS_ROUNDED: tl.constexpr, DTYPE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    # Only now, so that later kernels may read the order of rows before their own waits.
    let_next_start(DEPENDENT)
    expert, rows, is_row, pairs = find_rows(
        tl.program_id(1), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    if tl.sum(is_row.to(tl.int32), 0) == 0:
        return
    tokens = (pairs // TOP_K).to(tl.int64)
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    blocks: tl.constexpr = (HIDDEN + _FP8_BLOCK - 1) // _FP8_BLOCK
    part_blocks: tl.constexpr = (INNER + _FP8_BLOCK - 1) // _FP8_BLOCK
    gate_ptrs = weight_ptr + (expert * 2 * INNER + columns)[None, :] * HIDDEN
    scale_ptrs = scale_ptr + (expert * 2 * part_blocks + first_column // _FP8_BLOCK) * blocks
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(blocks):
        depth = block * _FP8_BLOCK + tl.arange(0, _FP8_BLOCK)
        is_depth = depth < HIDDEN
        in_x = is_row[:, None] & is_depth[None, :]
        x = tl.load(x_ptr + tokens[:, None] * HIDDEN + depth[None, :], mask=in_x, other=0.0)
        x_scale = tl.load(x_scale_ptr + tokens * blocks + block, mask=is_row, other=0.0)
        in_weight = is_depth[:, None] & is_column[None, :]
        at = gate_ptrs + depth[:, None]
        gate = _with_block(gate, x, at, in_weight, x_scale, scale_ptrs + block, BY_ROW)
        up = _with_block(
            up, x, at + INNER * HIDDEN, in_weight, x_scale,
            scale_ptrs + part_blocks * blocks + block, BY_ROW,
        )  # fmt: skip
    at = expert * 2 * INNER + columns
    gate = _finished(gate, scale_ptr, bias_ptr, at, is_column, BY_ROW, HAS_BIAS)
    up = _finished(up, scale_ptr, bias_ptr, at + INNER, is_column, BY_ROW, HAS_BIAS)
    result = gated(gate, up, alpha, limit, IS_CLAMPED).to(DTYPE)
    if IS_ROUNDED:
        result, result_scale = rounded(result)
        at_scale = rows * part_blocks + first_column // _FP8_BLOCK
        tl.store(output_scale_ptr + at_scale, result_scale, mask=is_row)
    in_output = is_row[:, None] & is_column[None, :]
    output_ptrs = output_ptr + rows[:, None] * INNER + columns[None, :]
    tl.store(output_ptrs, result, mask=in_output)


@triton.jit
def _down_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, pairs_ptr, starts_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BY_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_E: tl.constexpr,
    IS_ALONE: tl.constexpr, IS_ROUNDED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    expert, rows, is_row, pairs = find_rows(
        tl.program_id(1), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    if tl.sum(is_row.to(tl.int32), 0) == 0:
        return
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    blocks: tl.constexpr = (INNER + _FP8_BLOCK - 1) // _FP8_BLOCK
    row_blocks: tl.constexpr = (HIDDEN + _FP8_BLOCK - 1) // _FP8_BLOCK
    weight_ptrs = weight_ptr + (expert * HIDDEN + columns)[None, :] * INNER
    scale_ptrs = scale_ptr + (expert * row_blocks + first_column // _FP8_BLOCK) * blocks
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(blocks):
        depth = block * _FP8_BLOCK + tl.arange(0, _FP8_BLOCK)
        is_depth = depth < INNER
        in_x = is_row[:, None] & is_depth[None, :]
        x = tl.load(x_ptr + rows[:, None] * INNER + depth[None, :], mask=in_x, other=0.0)
        if IS_ROUNDED:
            x_scale = tl.load(x_scale_ptr + rows * blocks + block, mask=is_row, other=0.0)
        else:
            x, x_scale = rounded(x)
        in_weight = is_depth[:, None] & is_column[None, :]
        acc = _with_block(
            acc, x, weight_ptrs + depth[:, None], in_weight, x_scale, scale_ptrs + block, BY_ROW
        )
    at = expert * HIDDEN + columns
    acc = _finished(acc, scale_ptr, bias_ptr, at, is_column, BY_ROW, HAS_BIAS)
    in_output = is_row[:, None] & is_column[None, :]
    output_ptrs = output_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=in_output)


def apply_fp8(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does, into `output`; both contiguous."""
    find_results = _squared_results if experts.is_squared else _results
    results = find_results(hidden, weights, ids, experts)
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def _results(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Returns the results of pairs, not yet weighted, [T * top_k, H]."""
    num_experts, hidden_size, inner = experts.down.shape
    top_k, num_pairs, num_choices = ids.shape[1], ids.numel(), experts.num_choices
    is_alone = are_few(num_pairs, num_choices, top_k)
    pairs, starts = (ids, ids) if is_alone else sort_by_expert(ids, num_experts, num_choices)
    gate_up_tiles, down_tiles = _fitted(
        num_pairs, num_choices, inner, is_alone, is_batch_invariant(), hidden.itemsize,
        hidden.device,
    )  # fmt: skip
    is_rounded = gate_up_tiles.columns == BLOCK
    between = hidden.new_empty(num_pairs, inner, dtype=FP8 if is_rounded else hidden.dtype)
    # Without such scales the kernels touch none.
    between_scale = weights
    if is_rounded:
        between_scale = weights.new_empty(num_pairs, triton.cdiv(inner, BLOCK))
    results = hidden.new_empty(num_pairs, hidden_size)
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts), "BY_ROW": experts.is_scaled_by_row,
        "HAS_BIAS": experts.gate_up_bias is not None, "IS_ALONE": is_alone,
        "IS_ROUNDED": is_rounded,
        **launch_options(hidden.device),
    }  # fmt: skip
    gate_up_bias, down_bias = experts.biases_or(weights)

    def grid(num_columns: int, tiles: FP8ExpertTiles) -> tuple[int, int]:
        """Returns the programs of features, and of rows in the worst case."""
        num_tiles = num_pairs if is_alone else num_pairs // tiles.rows + num_experts
        return triton.cdiv(num_columns, tiles.columns), num_tiles

    _gate_up_kernel[grid(inner, gate_up_tiles)](
        *quantize(hidden, BLOCK), experts.gate_up, experts.gate_up_scale, gate_up_bias, pairs,
        starts, between, between_scale, experts.alpha, experts.limit or 0.0,
        TOP_K=top_k, IS_CLAMPED=experts.clamp, DTYPE=_DTYPES[hidden.dtype],
        **constants_of(gate_up_tiles), **shape,
    )  # fmt: skip
    _down_kernel[grid(hidden_size, down_tiles)](
        between, between_scale, experts.down, experts.down_scale, down_bias, pairs, starts,
        results, **constants_of(down_tiles), **shape,
    )  # fmt: skip
    return results


def _squared_results(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Returns the results of pairs of experts without gates, not yet weighted, [T * top_k, H]."""
    del weights
    order = PairOrder.of(ids, len(experts.down), experts.num_choices)
    inner = fp8_product(
        order.of_tokens(hidden), experts.gate_up, experts.gate_up_scale, None, order=order
    )
    x = order.sorted(inner).relu().square()
    return fp8_product(x, experts.down, experts.down_scale, None, order=order)


def fp8_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    order: PairOrder,
) -> torch.Tensor:
    """Returns the product of each pair with its expert's matrix, [T * top_k, N], by token.

    Args:
        x: [T * top_k, K], in the order of the pairs; it is rounded to FP8.
        weight: [E, N, K]. Parts of the rows with scales by block begin at multiples of a block.
        scale: of models.ops.experts.expert_formats.
        bias: [E, N].
        order: of the pairs.
    """
    assert scale is not None, "FP8 has scales"
    num_experts, num_outputs, num_inputs = weight.shape
    _, tiles = _tiles(
        order.num_pairs, order.num_choices, num_inputs, order.is_alone, is_batch_invariant(),
        x.device,
    )  # fmt: skip
    tiles = _fitting(tiles, x.itemsize, x.device, num_matrices=1)
    output = x.new_empty(order.num_pairs, num_outputs)
    _down_kernel[(triton.cdiv(num_outputs, tiles.columns), order.num_tiles(tiles.rows))](
        x, scale, weight, scale, scale if bias is None else bias, order.pairs, order.starts,
        output, HIDDEN=num_outputs, INNER=num_inputs, NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BY_ROW=scale.shape[1:] == (num_outputs, 1), HAS_BIAS=bias is not None,
        IS_ALONE=order.is_alone, IS_ROUNDED=False, **launch_options(x.device),
        **constants_of(tiles),
    )  # fmt: skip
    return output


@lru_cache(maxsize=1024)
def _fitted(
    num_pairs: int,
    num_choices: int,
    inner: int,
    is_alone: bool,
    is_invariant: bool,
    itemsize: int,
    device: torch.device,
) -> tuple[FP8ExpertTiles, FP8ExpertTiles]:
    """Returns the tiles of gate and up, and of down, which fit into shared memory."""
    gate_up, down = _tiles(num_pairs, num_choices, inner, is_alone, is_invariant, device)
    itemsize = 1 if gate_up.columns == BLOCK else itemsize
    return (
        _fitting(gate_up, 1, device, num_matrices=2),
        _fitting(down, itemsize, device, num_matrices=1),
    )


def _tiles(
    num_pairs: int, num_choices: int, inner: int, is_alone: bool, is_invariant: bool,
    device: torch.device,
) -> tuple[FP8ExpertTiles, FP8ExpertTiles]:  # fmt: skip
    """Returns the tiles of gate and up, and of down, of any size."""
    tables = tables_on(device)
    if is_alone:
        return row_of(tables.fp8_experts_alone, inf if is_invariant else inner)
    rows = tile_rows(num_pairs, num_choices)
    return tables.fp8_experts[max(rows, _INVARIANT_ROWS) if is_invariant else rows]


def _fitting(
    tiles: FP8ExpertTiles, itemsize: int, device: torch.device, *, num_matrices: int
) -> FP8ExpertTiles:
    """Returns tiles with as many stages of inputs, of `itemsize` bytes, and weights as fit."""
    stage_bytes = (tiles.rows * itemsize + num_matrices * tiles.columns) * BLOCK
    return tiles.fitting(gpu_of(device), stage_bytes)
