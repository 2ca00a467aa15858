"""Random numbers that depend only on a seed and a position.

A counter-based generator has no state between steps, so a request draws the same numbers in any
batch and after any recomputation.

Source: splitmix64, Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators",
figure 16 (the constants are Stafford's variant 13).
"""

from torch import Tensor

from models.operands.draws import GOLDEN_GAMMA, MANTISSA_BITS, MIX_1, MIX_2


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns one number in [0, 1) for each pair of a seed and a position, [S] float64.

    The numbers are multiples of 2**-48. seeds: [S] int64, all 64 bits count.
    """
    # Mix the seed before adding the position: neighbouring seeds would otherwise share one
    # sequence at an offset.
    bits = _mix(_mix(seeds + _signed(GOLDEN_GAMMA)) + positions.long() * _signed(GOLDEN_GAMMA))
    return _shift_right(bits, 64 - MANTISSA_BITS).double() * 2.0**-MANTISSA_BITS


def _mix(bits: Tensor) -> Tensor:
    """Scrambles 64 bits, one to one; int64 multiplication wraps as unsigned would."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(MIX_2)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shifts in zeros; int64's own shift copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
