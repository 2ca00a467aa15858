"""Constants of a draw, which kernel and reference must share bit for bit."""

import math

NO_TOKEN = -1
"""Token of a row whose logits are not finite; never look it up."""

WEIGHT_BITS = 44
"""Bits of the largest weight: the sum of 2**19 tokens still fits into int64."""

FRACTION_BITS = 24
MIN_TEMPERATURE = 1e-30
"""Lower temperatures count as this one: their scale would overflow, and 0 * scale would not be 0.
"""

MAX_HALVINGS = 60.0
EXP2_TERMS = tuple(math.log(2) ** k / math.factorial(k) for k in range(7))
"""Taylor series of 2**x. Up to |x| = 1/2 the rest is below float32's rounding."""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MANTISSA_BITS = 48  # few enough that u * total < total survives rounding in fp64
