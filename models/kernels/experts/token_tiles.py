"""Tiles of the tokens of experts, for kernels whose programs go from tile to tile with a ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(first, second):
    return first + second


@gluon.jit
def tiles_of_experts(
    starts_ptr, NUM_EXPERTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_E: gl.constexpr
):
    """Returns all experts, their first rows, the ends of these, and tiles of each and before it."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    experts = gl.arange(0, BLOCK_E, flat)
    is_expert = experts < NUM_EXPERTS
    starts = gl.load(starts_ptr + experts, mask=is_expert, other=0)
    ends = gl.load(starts_ptr + experts + 1, mask=is_expert, other=0)
    counts = (ends - starts + TOKENS - 1) // TOKENS
    before = gl.associative_scan(counts, 0, _add) - counts
    return experts, starts, ends, counts, before


@gluon.jit
def after(slot, phase, SLOTS: gl.constexpr):
    """Returns the next slot of the ring, and the phase of its barriers."""
    is_last = slot == SLOTS - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)
