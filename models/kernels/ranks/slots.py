"""The slots of rows in the ranks' memory, as kernels find them, and reports of late ranks."""

import triton
import triton.language as tl

from models.kernels.ranks.words import send_words, wait_for_words


@triton.jit
def send_row(
    peers_ptr, peer, phase, row, vector, words, is_wanted,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
):  # fmt: skip
    """Writes words of a row of this rank into another rank's memory."""
    slot = _slot_of(peers_ptr, peer, phase, RANK, row, vector, SIZE, RANKS, MOST_ROWS)
    send_words(slot, words, is_wanted)


@triton.jit
def wait_for_row(
    peers_ptr, source, phase, row, vector, is_awaited, missing_ptr, report_ptr, max_cycles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
):  # fmt: skip
    """Returns the words of a row that another rank has sent; reports the rank if it is late."""
    slot = _slot_of(peers_ptr, RANK, phase, source, row, vector, SIZE, RANKS, MOST_ROWS)
    words, is_late = wait_for_words(slot, is_awaited, max_cycles)
    at = is_late * 0
    number = at + source + 1
    tl.store(missing_ptr + at, number, mask=is_late != 0)
    tl.store(report_ptr + at, number, mask=is_late != 0)
    return words


@triton.jit
def end_phase(phases_ptr, row, phase):
    """Makes the next call use the other buffer for a row, once all threads have read the phase."""
    tl.debug_barrier()
    tl.store(phases_ptr + row, (1 - phase).to(tl.int32))


@triton.jit
def _slot_of(
    peers_ptr, rank, phase, source, row, vector,
    SIZE: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
):  # fmt: skip
    """Returns the addresses in a rank's memory for a row that another one sends."""
    base = tl.load(peers_ptr + rank)
    return base + (((phase * RANKS + source) * MOST_ROWS + row) * SIZE + vector * 8) * 2
