"""Sorts many pairs of a token and an expert by expert, in two launches.

The first counts each expert's pairs in every block of pairs. In the second, a pair's place is the
number of pairs of experts before its own, of its expert's pairs in earlier blocks, and of those
before it in its block.
"""

import torch
import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)

_PAIRS = 256
"""Of a block, which a program compares with each other."""
_AT_ONCE = tl.constexpr(32)
"""Blocks whose counts a program reads at once, and pairs that it compares all others with."""


@triton.jit
def _experts_of(
    block, experts_ptr, num_pairs, inside, NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr
):
    """Returns the experts of pairs of a block; NUM_EXPERTS past the end."""
    pairs = block * PAIRS + inside
    return tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs, NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_E: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes how many pairs of a block each expert has, [blocks, BLOCK_E]."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    ids = _experts_of(block, experts_ptr, num_pairs, tl.arange(0, PAIRS), NUM_EXPERTS, PAIRS)
    counts = tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * BLOCK_E + experts, counts)


@triton.jit
def _counted(block, num_blocks, counts_ptr, BLOCK_E: tl.constexpr):
    """Returns how many pairs each expert has in all blocks, and in those before a block."""
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros([_AT_ONCE, BLOCK_E], tl.int32)
    before = counts
    for first in range(0, num_blocks, _AT_ONCE):
        blocks = first + tl.arange(0, _AT_ONCE)[:, None]
        at = counts_ptr + blocks * BLOCK_E + experts[None, :]
        some = tl.load(at, mask=blocks < num_blocks, other=0)
        counts += some
        before += tl.where(blocks < block, some, 0)
    return tl.sum(counts, 0), tl.sum(before, 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    experts_ptr, counts_ptr, pairs_ptr, starts_ptr, rows_ptr, num_pairs,
    NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_E: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes a block's pairs where they belong, the first block also where experts start.

    rows_ptr, unless None, takes the place of each pair.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    counts, before = _counted(block, tl.num_programs(0), counts_ptr, BLOCK_E)
    ends = tl.cumsum(tl.where(experts < NUM_EXPERTS, counts, 0), 0)
    starts = ends - counts
    if block == 0:
        tl.store(starts_ptr + experts, starts, mask=experts < NUM_EXPERTS)
        tl.store(starts_ptr + NUM_EXPERTS, tl.max(ends, 0))
    inside = tl.arange(0, PAIRS)
    ids = _experts_of(block, experts_ptr, num_pairs, inside, NUM_EXPERTS, PAIRS)
    equal = tl.zeros([PAIRS, _AT_ONCE], tl.int32)
    for first in tl.static_range(0, PAIRS, _AT_ONCE):
        others = first + tl.arange(0, _AT_ONCE)
        other_ids = _experts_of(block, experts_ptr, num_pairs, others, NUM_EXPERTS, PAIRS)
        is_before = others[None, :] < inside[:, None]
        equal += ((ids[:, None] == other_ids[None, :]) & is_before).to(tl.int32)
    first_places = tl.where(ids[:, None] == experts[None, :], (starts + before)[None, :], 0)
    at = tl.sum(first_places, 1) + tl.sum(equal, 1)
    pairs = block * PAIRS + inside
    tl.store(pairs_ptr + at, pairs, mask=ids < NUM_EXPERTS)
    if rows_ptr is not None:
        tl.store(rows_ptr + pairs, at, mask=ids < NUM_EXPERTS)


def sort_many_pairs(
    ids: torch.Tensor,
    num_experts: int,
    pairs: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Fills what models.kernels.experts.moe_routing.sort_by_expert returns."""
    num_pairs, device = ids.numel(), ids.device
    num_blocks, block_e = triton.cdiv(num_pairs, _PAIRS), triton.next_power_of_2(num_experts)
    counts = torch.empty(num_blocks, block_e, dtype=torch.int32, device=device)
    shape = {
        "NUM_EXPERTS": num_experts, "PAIRS": _PAIRS, "BLOCK_E": block_e, "num_warps": 8,
        **launch_options(device),
    }  # fmt: skip
    _count_kernel[(num_blocks,)](ids, counts, num_pairs, **shape)
    _place_kernel[(num_blocks,)](ids, counts, pairs, starts, rows, num_pairs, **shape)
