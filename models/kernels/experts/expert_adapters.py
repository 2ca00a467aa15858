"""Low-rank adapters of experts' products, of all experts and adapters of a step in two kernels.

Pairs of a token and an expert are sorted by expert for the products anyway. Each program has a tile
of one expert's pairs and goes through the adapters among them, from the last slot to the first, as
models.kernels.products.add_adapters does with tokens. So the grid depends on shapes alone.
"""

import torch
import triton
import triton.language as tl

from models.batch_invariance import is_batch_invariant
from models.kernels.experts.expert_forms import TILE_ROWS, tile_rows
from models.kernels.experts.moe_grouped import find_rows
from models.kernels.experts.pair_order import PairOrder
from models.kernels.products.adapter_tiles import inner_columns, most_rows, rank_columns

_DEPTH = 64
"""Inputs that a step of the first kernel's loop multiplies."""


@triton.jit
def _expert_shrink_kernel(
    x_ptr, a_ptr, slots_ptr, pairs_ptr, starts_ptr, inner_ptr,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    """Writes x @ A^T of pairs in slots, inner [pairs, N]; SHARED neighbouring pairs share an x."""
    expert, _, is_row, pairs = find_rows(
        tl.program_id(0), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=is_row, other=0)
    slot = tl.max(slots, 0)
    pairs = pairs.to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < N
    while slot > 0:
        is_own = slots == slot
        matrix_ptr = a_ptr + ((slot - 1).to(tl.int64) * NUM_EXPERTS + expert) * N * K
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, DEPTH):
            inputs = start + tl.arange(0, DEPTH)
            is_input = inputs < K
            x = tl.load(
                x_ptr + (pairs // SHARED)[:, None] * K + inputs[None, :],
                mask=is_own[:, None] & is_input[None, :], other=0.0,
            )  # fmt: skip
            a = tl.load(
                matrix_ptr + columns[None, :] * K + inputs[:, None],
                mask=is_column[None, :] & is_input[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(x, a, total, input_precision="ieee")
        target = inner_ptr + pairs[:, None] * N + columns[None, :]
        tl.store(target, total, mask=is_own[:, None] & is_column[None, :])
        slot = tl.max(tl.where(slots < slot, slots, 0), 0)


@triton.jit
def _expert_expand_kernel(
    product_ptr, inner_ptr, b_ptr, slots_ptr, pairs_ptr, starts_ptr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    """Adds inner @ B^T to COLUMNS of the SIZE outputs of one part, for pairs in slots."""
    expert, _, is_row, pairs = find_rows(
        tl.program_id(0), pairs_ptr, starts_ptr, NUM_EXPERTS, ROWS, BLOCK_E, IS_ALONE
    )
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=is_row, other=0)
    slot = tl.max(slots, 0)
    pairs = pairs.to(tl.int64)
    tiles: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    part = tl.program_id(1) // tiles
    own = tl.program_id(1) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    is_output, columns = own < SIZE, part * SIZE + own
    ranks = tl.arange(0, BLOCK_R)
    is_rank = ranks < RANK
    targets = product_ptr + pairs[:, None] * (PARTS * SIZE) + columns[None, :]
    while slot > 0:
        is_own = slots == slot
        inner = tl.load(
            inner_ptr + pairs[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :],
            mask=is_own[:, None] & is_rank[None, :], other=0.0,
        )  # fmt: skip
        matrix_ptr = b_ptr + ((slot - 1).to(tl.int64) * NUM_EXPERTS + expert) * PARTS * SIZE * RANK
        b = tl.load(
            matrix_ptr + columns[None, :] * RANK + ranks[:, None],
            mask=is_output[None, :] & is_rank[:, None], other=0.0,
        )  # fmt: skip
        added = tl.dot(inner.to(b.dtype), b, input_precision="ieee")
        is_entry = is_own[:, None] & is_output[None, :]
        product = tl.load(targets, mask=is_entry, other=0.0)
        tl.store(targets, (product.to(tl.float32) + added).to(product.dtype), mask=is_entry)
        slot = tl.max(tl.where(slots < slot, slots, 0), 0)


def add_expert_adapters(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    slots: torch.Tensor,
    order: PairOrder,
) -> None:
    """Adds x @ A^T @ B^T of each pair's expert and adapter to the products of pairs, in place.

    Args:
        product: [T * top_k, N] in the order of tokens, contiguous.
        x: [T, K], or [T * top_k, K] with a row for each pair, contiguous.
        adapter_a: [S, E, P * R, K], for P equal parts of the outputs.
        adapter_b: [S, E, N, R], scaled.
        slots: [at least T] int32: 0 for none, n + 1 for slot n.
        order: of the pairs.
    """
    num_inner, num_inputs = adapter_a.shape[2:]
    num_outputs, rank = adapter_b.shape[2:]
    num_parts = num_inner // rank
    rows = TILE_ROWS[0]  # of any number of pairs in batch-invariant mode
    most = most_rows(rank)
    if not order.is_alone and not is_batch_invariant():
        rows = min(most, tile_rows(order.num_pairs, order.num_choices))
    shape = {
        "TOP_K": order.top_k, "NUM_EXPERTS": order.num_experts, "ROWS": rows,
        "BLOCK_E": triton.next_power_of_2(order.num_experts), "IS_ALONE": order.is_alone,
        "num_warps": 4,
    }  # fmt: skip
    inner = x.new_empty(order.num_pairs, num_inner, dtype=torch.float32)
    num_tiles = order.num_tiles(rows)
    columns = inner_columns(num_inner)
    _expert_shrink_kernel[(num_tiles, triton.cdiv(num_inner, columns))](
        x, adapter_a, slots, order.pairs, order.starts, inner,
        K=num_inputs, N=num_inner, SHARED=order.num_pairs // len(x), COLUMNS=columns, DEPTH=_DEPTH,
        num_stages=3, **shape,
    )  # fmt: skip
    size = num_outputs // num_parts
    _expert_expand_kernel[(num_tiles, num_parts * triton.cdiv(size, most))](
        product, inner, adapter_b, slots, order.pairs, order.starts,
        SIZE=size, PARTS=num_parts, RANK=rank, COLUMNS=most,
        BLOCK_R=rank_columns(rank), num_stages=2, **shape,
    )  # fmt: skip
