"""Gathers all ranks' rows, and sums and shares them out again, for few rows.

Each rank writes its rows into the memory of the others, by the rules of `all_reduce_norm`. A rank's
slots for a row serve both kernels in turn: in each call every rank sends and awaits the row.
"""

import triton
import triton.language as tl

from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
from models.kernels.ranks.slots import end_phase, send_row, wait_for_row
from models.kernels.ranks.words import (
    added,
    as_sent,
    elements,
    load_words,
    store_words,
    words_of,
)


@triton.jit
def _address_of(x_ptr, row, vector, SIZE: tl.constexpr):
    return x_ptr.to(tl.int64) + (row * SIZE + vector * 8) * 2


@triton.jit(do_not_specialize=["num_rows"])
def gather_rows_kernel(
    x_ptr, gathered_ptr, peers_ptr, phases_ptr, missing_ptr, report_ptr, num_rows, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes the rows of all ranks, rank after rank; all ranks get equal bits.

    A rank that is late is written to missing_ptr, and no program waits any more.
    """
    vector = tl.arange(0, VECTORS)
    is_vector = vector * 8 < SIZE
    program = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    is_awaited = is_vector & (tl.load(missing_ptr) == 0)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        words = load_words(_address_of(x_ptr, row, vector, SIZE), is_vector)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                send_row(
                    peers_ptr, peer, phase, row, vector, words, is_vector,
                    SIZE, RANK, RANKS, MOST_ROWS,
                )  # fmt: skip
        at = _address_of(gathered_ptr, row + RANK * num_rows, vector, SIZE)
        store_words(at, as_sent(words), is_vector)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        for source in tl.static_range(RANKS):
            if source != RANK:
                words = wait_for_row(
                    peers_ptr, source, phase, row, vector, is_awaited, missing_ptr, report_ptr,
                    max_cycles, SIZE, RANK, RANKS, MOST_ROWS,
                )  # fmt: skip
                at = _address_of(gathered_ptr, row + source * num_rows, vector, SIZE)
                store_words(at, as_sent(words), is_vector)
        end_phase(phases_ptr, row, phase)
    let_next_start(DEPENDENT)


@triton.jit(do_not_specialize=["num_rows"])
def reduce_scatter_kernel(
    x_ptr, share_ptr, peers_ptr, phases_ptr, missing_ptr, report_ptr, num_rows, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes this rank's num_rows rows of the sum of all ranks' x, which has rows for every rank.

    Sums are in float32, ranks in ascending order, rounded once. A rank that is late is written to
    missing_ptr, and no program waits any more.
    """
    DTYPE: tl.constexpr = share_ptr.dtype.element_ty
    vector = tl.arange(0, VECTORS)
    is_vector = vector * 8 < SIZE
    program = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    is_awaited = is_vector & (tl.load(missing_ptr) == 0)
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                at = _address_of(x_ptr, row + peer * num_rows, vector, SIZE)
                send_row(
                    peers_ptr, peer, phase, row, vector, load_words(at, is_vector), is_vector,
                    SIZE, RANK, RANKS, MOST_ROWS,
                )  # fmt: skip
    for row in range(program, num_rows, tl.num_programs(0)):
        phase = tl.load(phases_ptr + row).to(tl.int64)
        total = elements((vector * 0, vector * 0, vector * 0, vector * 0), DTYPE)
        for source in tl.static_range(RANKS):
            if source == RANK:
                at = _address_of(x_ptr, row + RANK * num_rows, vector, SIZE)
                words = load_words(at, is_vector)
            else:
                words = wait_for_row(
                    peers_ptr, source, phase, row, vector, is_awaited, missing_ptr, report_ptr,
                    max_cycles, SIZE, RANK, RANKS, MOST_ROWS,
                )  # fmt: skip
            total = added(total, elements(words, DTYPE))
        store_words(_address_of(share_ptr, row, vector, SIZE), words_of(total, DTYPE), is_vector)
        end_phase(phases_ptr, row, phase)
    let_next_start(DEPENDENT)
