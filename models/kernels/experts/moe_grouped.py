"""Experts for many tokens: products of an expert's weights with the rows that chose it.

Rows are sorted by expert, and a program multiplies one tile of rows of one expert. The grid fits
the worst case, so that it depends on shapes alone; programs without rows return. Weights are the
left factor: tensor cores need 64 rows there, and an expert may have few.
"""

from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from models.kernels.experts.expert_forms import TILE_ROWS, tile_rows
from models.kernels.experts.moe_routing import sort_by_expert
from models.kernels.experts.pair_order import PairOrder
from models.kernels.experts.swiglu import gated
from models.kernels.gpu import gpu_of
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.tuning.registry import tables_on
from models.kernels.tuning.tiles import GroupedTiles, constants_of
from models.operands.experts import ExpertWeights

_SUM_COLUMNS = 1024


_FLOAT_ROWS = 16


@triton.jit
def place(tile, starts_ptr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns a tile's expert, its first row and the end of the expert's rows.

    The first tile of expert i is first_row // ROWS + i: enough for the worst case, in which every
    expert ends in a tile of one row.
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
def _rows_of(
    tile, pairs_ptr, starts_ptr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    """Returns a tile's expert, its first row and the end of the rows it may take.

    With IS_ALONE each pair is a tile, in token order, and pairs_ptr holds the expert of each; a
    pair of an expert that is not here has no row.
    """
    if IS_ALONE:
        expert = tl.load(pairs_ptr + tile).to(tl.int64)
        return expert, tile, tile + (expert < NUM_EXPERTS).to(tl.int32)
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return place(tile, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E)


@triton.jit
def _pairs_of(rows, is_row, pairs_ptr, IS_ALONE: tl.constexpr):
    """Returns the pair of each row."""
    if IS_ALONE:
        return rows
    else:  # noqa: RET505  # as above
        return tl.load(pairs_ptr + rows, mask=is_row, other=0)


@triton.jit
def find_rows(
    tile, pairs_ptr, starts_ptr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    """Returns a tile's expert, rows, whether each row exists, and its pair; see _rows_of."""
    expert, first_row, end = _rows_of(
        tile, pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    return expert, rows.to(tl.int64), is_row, _pairs_of(rows, is_row, pairs_ptr, IS_ALONE)


@triton.jit
def _load_weights(
    weight, first_row, is_row, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, IS_DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Reads [COLUMNS, DEPTH] of all experts' stacked matrices.

    Rows past the matrix are the next one's or zero.
    """
    if IS_DESCRIBED:
        return weight.load([first_row.to(tl.int32), first])
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        rows = first_row + tl.arange(0, COLUMNS)
        depth = first + tl.arange(0, DEPTH)
        in_tile = is_row[:, None] & (depth < SIZE)[None, :]
        return tl.load(weight + rows[:, None] * SIZE + depth[None, :], mask=in_tile, other=0.0)


@triton.jit
def _gate_up_kernel(
    x_ptr, weight, bias_ptr, pairs_ptr, starts_ptr, output_ptr, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CLAMPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, IS_DESCRIBED: tl.constexpr,
    IS_ALONE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes a tile of gated inner features of one expert, in the order of its rows."""
    wait_for_previous(DEPENDENT)
    # Only now, so that the next kernel may read the order of rows before its own wait.
    let_next_start(DEPENDENT)
    expert, first_row, end = _rows_of(
        tl.program_id(1), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    tokens = (_pairs_of(rows, is_row, pairs_ptr, IS_ALONE) // TOP_K).to(tl.int64)
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    gate_row = expert * 2 * INNER + first_column
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(0, HIDDEN, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        in_x = (depth < HIDDEN)[:, None] & is_row[None, :]
        x = tl.load(x_ptr + tokens[None, :] * HIDDEN + depth[:, None], mask=in_x, other=0.0)
        gate_tile = _load_weights(
            weight, gate_row, is_column, first, HIDDEN, COLUMNS, DEPTH, IS_DESCRIBED
        )
        up_tile = _load_weights(
            weight, gate_row + INNER, is_column, first, HIDDEN, COLUMNS, DEPTH, IS_DESCRIBED
        )
        gate = tl.dot(gate_tile, x, gate, input_precision="ieee")
        up = tl.dot(up_tile, x, up, input_precision="ieee")
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * 2 * INNER + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptrs + INNER, mask=is_column, other=0.0).to(tl.float32)[:, None]
    result = gated(gate, up, alpha, limit, IS_CLAMPED)
    at = rows.to(tl.int64)[None, :] * INNER + columns[:, None]
    in_output = is_row[None, :] & is_column[:, None]
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=in_output)


@triton.jit
def _down_kernel(
    x, weight, bias_ptr, pairs_ptr, starts_ptr, output_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr,
    IS_DESCRIBED: tl.constexpr, IS_ALONE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes a tile of output features of one expert, not yet weighted, by token."""
    let_next_start(DEPENDENT)
    expert, first_row, end = _rows_of(
        tl.program_id(1), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    pairs = _pairs_of(rows, is_row, pairs_ptr, IS_ALONE).to(tl.int64)
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(0, INNER, DEPTH):
        if IS_DESCRIBED:
            # Rows past the expert's last one are others'; their products are not stored.
            x_tile = x.load([first_row, first]).T
        else:
            depth = first + tl.arange(0, DEPTH)
            in_x = (depth < INNER)[:, None] & is_row[None, :]
            at = rows.to(tl.int64)[None, :] * INNER + depth[:, None]
            x_tile = tl.load(x + at, mask=in_x, other=0.0)
        tile = _load_weights(
            weight, expert * HIDDEN + first_column, is_column, first, INNER, COLUMNS, DEPTH,
            IS_DESCRIBED,
        )  # fmt: skip
        acc = tl.dot(tile, x_tile, acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + columns, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    at = pairs[None, :] * HIDDEN + columns[:, None]
    in_output = is_row[None, :] & is_column[:, None]
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=in_output)


@triton.jit
def _sum_kernel(
    x_ptr, factors_ptr, output_ptr,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, IS_PARTIAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds up the weighted results of one token's experts, in the order of its choices.

    With IS_PARTIAL, pairs of weight 0 may have no results.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    acc = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        factor = tl.load(factors_ptr + pair)
        in_x = tl.where(factor != 0.0, is_column, False) if IS_PARTIAL else is_column
        x = tl.load(x_ptr + pair * HIDDEN + columns, mask=in_x, other=0.0)
        acc += x.to(tl.float32) * factor
    at = token * HIDDEN + columns
    tl.store(output_ptr + at, acc.to(output_ptr.dtype.element_ty), mask=is_column)


def apply_grouped(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
    *,
    is_alone: bool = False,
) -> None:
    """Does what models.kernels.experts.moe.apply_experts does, into `output`; both contiguous.

    is_alone: each pair has a tile of its own, so that nothing is sorted; the bits are the same.
    """
    num_experts, hidden_size, inner = experts.down.shape
    num_pairs = ids.numel()
    rows, gate_up_tiles, down_tiles = _tiles(
        num_pairs, experts.num_choices, is_alone, hidden.itemsize, hidden.device
    )
    pairs, starts, num_tiles = ids, ids, num_pairs
    if not is_alone:
        pairs, starts = sort_by_expert(ids, num_experts, experts.num_choices)
        num_tiles = num_pairs // rows + num_experts
    between = hidden.new_empty(num_pairs, inner)
    results = hidden.new_empty(num_pairs, hidden_size)
    is_described = not any(
        size * hidden.dtype.itemsize % COPY_ALIGNMENT for size in (hidden_size, inner)
    )
    shape = {
        "HIDDEN": hidden_size, "INNER": inner, "NUM_EXPERTS": num_experts, "ROWS": rows,
        "BLOCK_E": triton.next_power_of_2(num_experts), "IS_DESCRIBED": is_described,
        "IS_ALONE": is_alone, "HAS_BIAS": experts.gate_up_bias is not None,
        **launch_options(hidden.device),
    }  # fmt: skip
    gate_up_bias, down_bias = experts.biases_or(weights)

    described = partial(_described, is_described=is_described)
    tiles = gate_up_tiles
    _gate_up_kernel[(triton.cdiv(inner, tiles.columns), num_tiles)](
        hidden, described(experts.gate_up, tiles.columns, tiles), gate_up_bias, pairs, starts,
        between, experts.alpha, experts.limit or 0.0,
        TOP_K=ids.shape[1], IS_CLAMPED=experts.clamp, **constants_of(tiles), **shape,
    )  # fmt: skip
    tiles = down_tiles
    _down_kernel[(triton.cdiv(hidden_size, tiles.columns), num_tiles)](
        described(between, rows, tiles), described(experts.down, tiles.columns, tiles), down_bias,
        pairs, starts, results, **constants_of(tiles), **shape,
    )  # fmt: skip
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    order: PairOrder,
) -> torch.Tensor:
    """Returns the product of each pair with its expert's matrix, [T * top_k, N], by token.

    Args:
        x: [T * top_k, K], in the order of the pairs.
        weight: [E, N, K], without scales.
        scale: None.
        bias: [E, N].
        order: of the pairs.
    """
    assert scale is None, "weights are in the model's dtype"
    num_experts, num_outputs, num_inputs = weight.shape
    rows, _, tiles = _tiles(
        order.num_pairs, order.num_choices, order.is_alone, x.itemsize, x.device
    )
    is_described = not num_inputs * x.itemsize % COPY_ALIGNMENT
    described = partial(_described, tiles=tiles, is_described=is_described)
    output = x.new_empty(order.num_pairs, num_outputs)
    _down_kernel[(triton.cdiv(num_outputs, tiles.columns), order.num_tiles(rows))](
        described(x, rows), described(weight, tiles.columns), x if bias is None else bias,
        order.pairs, order.starts, output,
        HIDDEN=num_outputs, INNER=num_inputs, NUM_EXPERTS=num_experts, ROWS=rows,
        BLOCK_E=triton.next_power_of_2(num_experts), IS_DESCRIBED=is_described,
        IS_ALONE=order.is_alone, HAS_BIAS=bias is not None, **constants_of(tiles),
        **launch_options(x.device),
    )  # fmt: skip
    return output


def _described(
    matrix: torch.Tensor, num_rows: int, tiles: GroupedTiles, *, is_described: bool
) -> object:
    """Returns a matrix as the kernels take it, with tiles of `num_rows` rows."""
    if not is_described:
        return matrix
    size = matrix.shape[-1]
    shape = [matrix.numel() // size, size]
    return TensorDescriptor(matrix, shape, [size, 1], [num_rows, tiles.depth])


def sum_by_token(
    results: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, *, is_partial: bool
) -> None:
    """Adds up the weighted results of each token's experts, in the order of its choices.

    Maps results [T * top_k, H], by token, and weights [T, top_k] float32 to output [T, H].
    is_partial: whether rows of weight 0 may have no values.
    """
    (num_tokens, top_k), hidden_size = weights.shape, results.shape[1]
    block = min(_SUM_COLUMNS, triton.next_power_of_2(hidden_size))
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        results, weights, output, HIDDEN=hidden_size, TOP_K=top_k, COLUMNS=block,
        IS_PARTIAL=is_partial, num_warps=4,
        **launch_options(results.device),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _tiles(
    num_pairs: int, num_choices: int, is_alone: bool, itemsize: int, device: torch.device
) -> tuple[int, GroupedTiles, GroupedTiles]:
    """Returns the rows of a tile, and the tiles of gate and up and of down that fit."""
    tables = tables_on(device)
    if itemsize != 2:
        rows, both = _FLOAT_ROWS, (tables.grouped_experts_float,) * 2
    elif is_alone:
        rows, both = TILE_ROWS[0], tables.grouped_experts_alone
    else:
        rows = tile_rows(num_pairs, num_choices)
        both = tables.grouped_experts[rows]
    gate_up, down = both
    return (
        rows,
        _fitting(gate_up, rows, itemsize, device, num_matrices=2),
        _fitting(down, rows, itemsize, device, num_matrices=1),
    )


def _fitting(
    tiles: GroupedTiles, rows: int, itemsize: int, device: torch.device, *, num_matrices: int
) -> GroupedTiles:
    """Returns tiles with as many stages of inputs and weights as fit into shared memory."""
    stage_bytes = (rows + num_matrices * tiles.columns) * tiles.depth * itemsize
    return tiles.fitting(gpu_of(device), stage_bytes)
