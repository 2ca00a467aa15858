"""The mean square of a head in batch-invariant mode, whichever kernel computes it.

A kernel's layout decides in which order it adds floats. Integers have one sum.
"""

import triton
import triton.language as tl

from models.batch_invariance import is_batch_invariant

_MOST_ELEMENTS = 512
"""Of a head; longer rows have one kernel, and sums in its order."""
_UNITS = tl.constexpr(2.0**40)
"""Of the largest square: the rest is below what float32 keeps of the mean."""
_SMALLEST = tl.constexpr(1e-20)
"""The largest square counts as at least this, far below the epsilon of any norm."""


def sums_integers(size: int) -> bool:
    """Returns whether the norm of rows of `size` elements takes mean squares from this module."""
    return is_batch_invariant() and size <= _MOST_ELEMENTS


@triton.jit
def units_of(squares, largest):
    """Returns the squares as integers; `largest` is the row's, shaped to multiply."""
    return (squares * tl.div_rn(_UNITS, tl.maximum(largest, _SMALLEST))).to(tl.int64)


@triton.jit
def mean_of(units, largest, SIZE: tl.constexpr):
    """Returns the mean of SIZE squares, float32, from the sum of their units."""
    return units.to(tl.float32) / _UNITS * tl.maximum(largest, _SMALLEST) / SIZE
