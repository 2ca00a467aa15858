"""Sums shares of the rows on each rank, sends the sums to all, and normalises them.

Rank r owns the rows whose number modulo the ranks is r. All others send it their parts; it adds
them in the same order as `all_reduce_norm`, so the bits are the same, and sends the sum back. The
memory and its rules are those of that kernel: a rank's slot for an owner's part is free for the
sum, since the owner sends its part of its own rows to no rank.
"""

import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
from models.kernels.ranks.all_reduce_norm import own_words
from models.kernels.ranks.slots import end_phase, send_row, wait_for_row
from models.kernels.ranks.store_norm import store_norm
from models.kernels.ranks.words import (
    added,
    as_sent,
    elements,
    load_words,
    store_words,
    words_of,
)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def two_shot_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, scale_ptr, peers_ptr, phases_ptr, missing_ptr,
    report_ptr, eps, num_rows, scale_stride, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does as all_reduce_norm_kernel, with fewer bytes sent where there are many ranks."""
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    vector = tl.arange(0, VECTORS)
    is_vector = vector * 8 < SIZE
    program = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    is_awaited = is_vector & (tl.load(missing_ptr) == 0)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        words = own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS, DTYPE)
        owner = row % RANKS
        send_row(
            peers_ptr, owner, phase, row, vector, words, is_vector & (owner != RANK),
            SIZE, RANK, RANKS, MOST_ROWS,
        )  # fmt: skip
    for row in range(program, num_rows, tl.num_programs(0)):
        if row % RANKS == RANK:
            phase = tl.load(phases_ptr + row).to(tl.int64)
            at = residual_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2
            residual = load_words(at, is_vector)
            total = elements((vector * 0, vector * 0, vector * 0, vector * 0), DTYPE)
            for source in tl.static_range(RANKS):
                if source == RANK:
                    words = own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS, DTYPE)
                else:
                    words = wait_for_row(
                        peers_ptr, source, phase, row, vector, is_awaited, missing_ptr,
                        report_ptr, max_cycles, SIZE, RANK, RANKS, MOST_ROWS,
                    )  # fmt: skip
                total = added(total, elements(words, DTYPE))
            total = added(total, elements(residual, DTYPE))
            words = as_sent(words_of(total, DTYPE))
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    send_row(
                        peers_ptr, peer, phase, row, vector, words, is_vector,
                        SIZE, RANK, RANKS, MOST_ROWS,
                    )  # fmt: skip
            store_words(at, words, is_vector)
            store_norm(
                words, weight_ptr, normed_ptr, scale_ptr, scale_stride, row, vector, is_vector,
                eps, SIZE, GROUP, VECTORS, DTYPE,
            )  # fmt: skip
            end_phase(phases_ptr, row, phase)
    for row in range(program, num_rows, tl.num_programs(0)):
        owner = row % RANKS
        if owner != RANK:
            phase = tl.load(phases_ptr + row).to(tl.int64)
            words = wait_for_row(
                peers_ptr, owner, phase, row, vector, is_awaited, missing_ptr, report_ptr,
                max_cycles, SIZE, RANK, RANKS, MOST_ROWS,
            )  # fmt: skip
            words = as_sent(words)
            at = residual_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2
            store_words(at, words, is_vector)
            store_norm(
                words, weight_ptr, normed_ptr, scale_ptr, scale_stride, row, vector, is_vector,
                eps, SIZE, GROUP, VECTORS, DTYPE,
            )  # fmt: skip
            end_phase(phases_ptr, row, phase)
    let_next_start(DEPENDENT)
