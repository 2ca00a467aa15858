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
    elements,
    load_words,
    send_words,
    store_words,
    wait_for_words,
    word_of,
)
from models.ops.triton.launching.dependent_launch import let_next_start, wait_for_previous


@triton.jit
def _own_words(x_ptr, row, num_rows, vector, is_vector, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Loads this rank's addend of a row, or adds up its PARTS in float32."""
    if PARTS == 0:
        return load_words(x_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2, is_vector)
    DTYPE: tl.constexpr = tl.bfloat16
    first = tl.zeros_like(vector).to(tl.float32)
    a0 = first
    a1 = first
    b0 = first
    b1 = first
    c0 = first
    c1 = first
    d0 = first
    d1 = first
    for part in tl.static_range(PARTS):
        address = x_ptr.to(tl.int64) + ((part * num_rows + row) * SIZE + vector * 8) * 4
        a, b, c, d = load_words(address, is_vector)
        a0 += a.to(tl.float32, bitcast=True)
        a1 += b.to(tl.float32, bitcast=True)
        b0 += c.to(tl.float32, bitcast=True)
        b1 += d.to(tl.float32, bitcast=True)
        a, b, c, d = load_words(address + 16, is_vector)
        c0 += a.to(tl.float32, bitcast=True)
        c1 += b.to(tl.float32, bitcast=True)
        d0 += c.to(tl.float32, bitcast=True)
        d1 += d.to(tl.float32, bitcast=True)
    return (
        word_of(a0, a1, DTYPE), word_of(b0, b1, DTYPE),
        word_of(c0, c1, DTYPE), word_of(d0, d1, DTYPE),
    )  # fmt: skip


@triton.jit
def _slot(peers_ptr, rank, phase, source, row, vector, SIZE: tl.constexpr, RANKS: tl.constexpr,
          MOST_ROWS: tl.constexpr):  # fmt: skip
    """Returns the addresses in a rank's memory for a row that another one sends."""
    base = tl.load(peers_ptr + rank)
    return base + (((phase * RANKS + source) * MOST_ROWS + row) * SIZE + vector * 8) * 2


@triton.jit
def _normalise(
    a0, a1, b0, b1, c0, c1, d0, d1, weight_ptr, normed_ptr, row, vector, is_vector, eps,
    SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores the normalised row."""
    squares = a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1 + c0 * c0 + c1 * c1 + d0 * d0 + d1 * d1
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    wa, wb, wc, wd = load_words(weight_ptr.to(tl.int64) + vector * 16, is_vector)
    wa0, wa1 = elements(wa, DTYPE)
    wb0, wb1 = elements(wb, DTYPE)
    wc0, wc1 = elements(wc, DTYPE)
    wd0, wd1 = elements(wd, DTYPE)
    store_words(
        normed_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2,
        word_of(a0 * scale * wa0, a1 * scale * wa1, DTYPE),
        word_of(b0 * scale * wb0, b1 * scale * wb1, DTYPE),
        word_of(c0 * scale * wc0, c1 * scale * wc1, DTYPE),
        word_of(d0 * scale * wd0, d1 * scale * wd1, DTYPE),
        is_vector,
    )


@triton.jit(do_not_specialize=["num_rows"])
def all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, peers_ptr, phases_ptr, missing_ptr, report_ptr,
    eps, num_rows, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    PARTS: tl.constexpr, VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Replaces rows of the residual stream by their sums with all ranks' x; normalises them.

    Sums are in float32, ranks in ascending order, rounded once: all ranks get equal bits. A
    rank that is late is written to missing_ptr, and nobody waits any more.
    """
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    vector = tl.arange(0, VECTORS)
    is_vector = vector * 8 < SIZE
    program = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    is_whole = tl.load(missing_ptr) == 0
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        a, b, c, d = _own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                slot = _slot(peers_ptr, peer, phase, RANK, row, vector, SIZE, RANKS, MOST_ROWS)
                send_words(slot, a, b, c, d, is_vector)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        at_residual = residual_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2
        ra, rb, rc, rd = load_words(at_residual, is_vector)
        a0 = tl.zeros([VECTORS], tl.float32)
        a1 = a0
        b0 = a0
        b1 = a0
        c0 = a0
        c1 = a0
        d0 = a0
        d1 = a0
        for source in tl.static_range(RANKS):
            if source == RANK:
                a, b, c, d = _own_words(x_ptr, row, num_rows, vector, is_vector, SIZE, PARTS)
            else:
                slot = _slot(peers_ptr, RANK, phase, source, row, vector, SIZE, RANKS, MOST_ROWS)
                a, b, c, d, is_late = wait_for_words(slot, is_vector & is_whole, max_cycles)
                at_report = tl.zeros_like(vector)
                tl.store(missing_ptr + at_report, source + 1, mask=is_late != 0)
                tl.store(report_ptr + at_report, source + 1, mask=is_late != 0)
            x0, x1 = elements(a, DTYPE)
            a0 += x0
            a1 += x1
            x0, x1 = elements(b, DTYPE)
            b0 += x0
            b1 += x1
            x0, x1 = elements(c, DTYPE)
            c0 += x0
            c1 += x1
            x0, x1 = elements(d, DTYPE)
            d0 += x0
            d1 += x1
        x0, x1 = elements(ra, DTYPE)
        ra = word_of(a0 + x0, a1 + x1, DTYPE)
        x0, x1 = elements(rb, DTYPE)
        rb = word_of(b0 + x0, b1 + x1, DTYPE)
        x0, x1 = elements(rc, DTYPE)
        rc = word_of(c0 + x0, c1 + x1, DTYPE)
        x0, x1 = elements(rd, DTYPE)
        rd = word_of(d0 + x0, d1 + x1, DTYPE)
        store_words(at_residual, ra, rb, rc, rd, is_vector)
        a0, a1 = elements(ra, DTYPE)
        b0, b1 = elements(rb, DTYPE)
        c0, c1 = elements(rc, DTYPE)
        d0, d1 = elements(rd, DTYPE)
        # Its sum over the row waits for all threads, which have read the phase by then.
        _normalise(
            a0, a1, b0, b1, c0, c1, d0, d1, weight_ptr, normed_ptr, row, vector, is_vector, eps,
            SIZE, DTYPE,
        )  # fmt: skip
        tl.store(phases_ptr + row, (1 - phase).to(tl.int32))
    let_next_start(DEPENDENT)
