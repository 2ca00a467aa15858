"""Adds all ranks' parts to the residual stream and normalises it, in one kernel.

Each rank writes its rows into the memory of the others and waits for theirs: no barrier, no flag.
A vector of 16 bytes has arrived when none of its words is 0 (`words`); the reader sets it to 0. Two
buffers alternate. A rank writes into one for the second time only after it has read the other's
part between the two, which that rank sends after it has read and cleared the first.

Every program waits for the same rows on all ranks and sends all of its rows before it waits, and
all programs fit on the GPU at once, so that none waits for one that cannot start.
"""

import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
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


@triton.jit
def own_words(
    x_ptr, row, num_rows, vector, is_vector,
    SIZE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Loads this rank's addend of a row, or the sum of its PARTS in float32."""
    if PARTS == 0:
        return load_words(x_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2, is_vector)
    total = elements((vector * 0, vector * 0, vector * 0, vector * 0), DTYPE)
    for part in tl.static_range(PARTS):
        address = x_ptr.to(tl.int64) + ((part * num_rows + row) * SIZE + vector * 8) * 4
        a, b, c, d = load_words(address, is_vector)
        e, f, g, h = load_words(address + 16, is_vector)
        addends = (
            a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True),
            c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True),
            e.to(tl.float32, bitcast=True), f.to(tl.float32, bitcast=True),
            g.to(tl.float32, bitcast=True), h.to(tl.float32, bitcast=True),
        )  # fmt: skip
        total = added(total, addends)
    return words_of(total, DTYPE)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, scale_ptr, peers_ptr, phases_ptr, missing_ptr,
    report_ptr, eps, num_rows, scale_stride, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Replaces rows of the residual stream by their sums with all ranks' x; normalises them.

    Sums are in float32, ranks in ascending order, rounded once: all ranks get equal bits. A rank
    that is late is written to missing_ptr, and no program waits any more. The norm is rounded to
    FP8 unless scale_ptr is None.
    """
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    vector = tl.arange(0, VECTORS)
    is_vector = vector * 8 < SIZE
    program = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    is_awaited = is_vector & (tl.load(missing_ptr) == 0)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        words = own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS, DTYPE)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                send_row(
                    peers_ptr, peer, phase, row, vector, words, is_vector,
                    SIZE, RANK, RANKS, MOST_ROWS,
                )  # fmt: skip
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        at = residual_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2
        residual = load_words(at, is_vector)
        total = elements((vector * 0, vector * 0, vector * 0, vector * 0), DTYPE)
        for source in tl.static_range(RANKS):
            if source == RANK:
                words = own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS, DTYPE)
            else:
                words = wait_for_row(
                    peers_ptr, source, phase, row, vector, is_awaited, missing_ptr, report_ptr,
                    max_cycles, SIZE, RANK, RANKS, MOST_ROWS,
                )  # fmt: skip
            total = added(total, elements(words, DTYPE))
        total = added(total, elements(residual, DTYPE))
        # As two shots send it, so that the number of rows does not decide the sign of a zero.
        words = as_sent(words_of(total, DTYPE))
        store_words(at, words, is_vector)
        store_norm(
            words, weight_ptr, normed_ptr, scale_ptr, scale_stride, row, vector, is_vector, eps,
            SIZE, GROUP, VECTORS, DTYPE,
        )  # fmt: skip
        end_phase(phases_ptr, row, phase)
    let_next_start(DEPENDENT)
