"""Splits a sequence's keys into parts for several programs, and adds up their results."""

import triton
import triton.language as tl

LEAST_PART = tl.constexpr(256)
"""Most keys that a program reads faster than parts are added up."""


@triton.jit
def combine_parts(
    partials_ptr, lse_ptr, output_ptr, active,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Stores the mean of `active` partial results, weighted by their sums of exponentials.

    .cg bypasses the first-level cache, which may hold values from before other programs wrote.
    """
    rows = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, BLOCK_D)
    in_rows = rows < GROUP
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    at_tile = rows[:, None] * HEAD_DIM + dims[None, :]
    splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(
        lse_ptr + splits[:, None] * GROUP + rows[None, :],
        mask=(splits < active)[:, None] & in_rows[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    # A padding row has no partial result; zero keeps its difference from being inf - inf.
    highest = tl.where(in_rows, tl.max(all_lse, 0), 0.0)
    total = tl.sum(tl.exp2(all_lse - highest[None, :]), 0)
    acc = tl.zeros([PADDED_GROUP, BLOCK_D], tl.float32)
    for first in range(0, active, UNROLL):
        # Unrolled, so that many parts are read at once.
        for offset in tl.static_range(UNROLL):
            split = first + offset
            is_active = split < active
            lse = tl.load(
                lse_ptr + split * GROUP + rows,
                mask=in_rows & is_active,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            partial = tl.load(
                partials_ptr + split * GROUP * HEAD_DIM + at_tile,
                mask=in_tile & is_active,
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.exp2(lse - highest)[:, None] * partial
    acc = acc / tl.where(in_rows, total, 1.0)[:, None]
    tl.store(output_ptr + at_tile, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def fair_part(
    seq_lens_ptr, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):
    """Returns how many keys each of NUM_PROGRAMS gets in an equal split.

    NUM_PROGRAMS is at least the number of requests.
    """
    requests = tl.arange(0, NUM_PROGRAMS)
    lens = tl.load(seq_lens_ptr + requests, mask=requests < tl.num_programs(1), other=0)
    if WINDOW > 0:
        lens = tl.minimum(lens, WINDOW)
    # In float32: the product may exceed 32 bits and need not be exact.
    return (tl.sum(lens.to(tl.float32), 0) * (NUM_KV_HEADS / NUM_PROGRAMS)).to(tl.int32)
