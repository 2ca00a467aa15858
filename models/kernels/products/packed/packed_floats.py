"""Floats of 4 bits in halves of words, on any GPU."""

import triton
import triton.language as tl

from models.operands.packed_weights import FLOAT_BITS

_SIGN_BITS = tl.constexpr(sum(sign << 4 * at for at, (sign, _) in enumerate(FLOAT_BITS)))
_LOWEST_BITS = tl.constexpr(sum(lowest << 4 * at for at, (_, lowest) in enumerate(FLOAT_BITS)))


@triton.jit
def float_of(halves, number):
    """Returns a float of each half of a word in the lower bits of int32, times 2**-14, in float32.

    Shifted into float16, whose values below 1 are subnormal too, so that no value needs a special
    case.
    number: which of the half's four.
    """
    sign = halves >> (_SIGN_BITS >> number * 4 & 15) & 1
    magnitude = halves >> (_LOWEST_BITS >> number * 4 & 15) & 7
    bits = sign << 15 | magnitude << 9
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
