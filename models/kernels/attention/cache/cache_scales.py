"""Scales of keys and values that the cache stores in FP8."""

import triton
import triton.language as tl

from models.kv_cache import SMALLEST_HEAD
from models.number_formats import FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST_HEAD = tl.constexpr(SMALLEST_HEAD)


@triton.jit
def scale_of(largest):
    """Returns the divisor of heads, given each head's largest magnitude; see quantize_heads."""
    return tl.maximum(largest, _SMALLEST_HEAD) / _FP8_MAX


@triton.jit
def exact_scale_of(largest):
    """Returns the divisor of one latent vector, to the bits that quantize_heads has."""
    return tl.div_rn(tl.maximum(largest, _SMALLEST_HEAD), tl.full([], _FP8_MAX, tl.float32))
