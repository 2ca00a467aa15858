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

from models.ops.triton.communication.words import (
    added,
    elements,
    load_words,
    multiplied,
    send_words,
    square_sum,
    store_words,
    wait_for_words,
    words_of,
)
from models.ops.triton.launching.dependent_launch import let_next_start, wait_for_previous


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


@triton.jit
def slot_of(
    peers_ptr, rank, phase, source, row, vector,
    SIZE: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
):  # fmt: skip
    """Returns the addresses in a rank's memory for a row that another one sends."""
    base = tl.load(peers_ptr + rank)
    return base + (((phase * RANKS + source) * MOST_ROWS + row) * SIZE + vector * 8) * 2


@triton.jit
def report(is_late, rank, missing_ptr, report_ptr):
    """Writes a rank that was late, counted from 1, for the GPU and for the host."""
    at = is_late * 0
    tl.store(missing_ptr + at, rank + 1, mask=is_late != 0)
    tl.store(report_ptr + at, rank + 1, mask=is_late != 0)


@triton.jit
def store_norm(
    words, weight_ptr, normed_ptr, at, vector, is_vector, eps,
    SIZE: tl.constexpr, VECTORS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores the norm of a row of the stream at an offset in bytes."""
    total = elements(words, DTYPE)
    scale = tl.rsqrt(tl.sum(square_sum(total), 0) / SIZE + eps)
    scale = scale + tl.zeros([VECTORS], tl.float32)
    scales = (scale, scale, scale, scale, scale, scale, scale, scale)
    weight = elements(load_words(weight_ptr.to(tl.int64) + vector * 16, is_vector), DTYPE)
    normed = multiplied(multiplied(total, scales), weight)
    store_words(normed_ptr.to(tl.int64) + at, words_of(normed, DTYPE), is_vector)


@triton.jit(do_not_specialize=["num_rows"])
def all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, peers_ptr, phases_ptr, missing_ptr, report_ptr,
    eps, num_rows, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    PARTS: tl.constexpr, VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Replaces rows of the residual stream by their sums with all ranks' x; normalises them.

    Sums are in float32, ranks in ascending order, rounded once: all ranks get equal bits. A rank
    that is late is written to missing_ptr, and no program waits any more.
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
                slot = slot_of(peers_ptr, peer, phase, RANK, row, vector, SIZE, RANKS, MOST_ROWS)
                send_words(slot, words, is_vector)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        at = (row * SIZE + vector * 8) * 2
        residual = load_words(residual_ptr.to(tl.int64) + at, is_vector)
        total = elements((vector * 0, vector * 0, vector * 0, vector * 0), DTYPE)
        for source in tl.static_range(RANKS):
            if source == RANK:
                words = own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS, DTYPE)
            else:
                slot = slot_of(peers_ptr, RANK, phase, source, row, vector, SIZE, RANKS, MOST_ROWS)
                words, is_late = wait_for_words(slot, is_awaited, max_cycles)
                report(is_late, source, missing_ptr, report_ptr)
            total = added(total, elements(words, DTYPE))
        total = added(total, elements(residual, DTYPE))
        words = words_of(total, DTYPE)
        store_words(residual_ptr.to(tl.int64) + at, words, is_vector)
        # The norm's sum over the row waits for all threads, which have read the phase by then.
        store_norm(words, weight_ptr, normed_ptr, at, vector, is_vector, eps, SIZE, VECTORS, DTYPE)
        tl.store(phases_ptr + row, (1 - phase).to(tl.int32))
    let_next_start(DEPENDENT)
