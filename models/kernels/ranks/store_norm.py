"""Normalises a row of the residual stream and stores it, in 16 bits or rounded to FP8."""

import triton
import triton.language as tl

from models.kernels.ranks.words import (
    elements,
    largest,
    load_words,
    multiplied,
    square_sum,
    store_bytes,
    store_words,
    words_of,
)
from models.number_formats import FP8_MAX, SMALLEST_AMAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def store_norm(
    words, weight_ptr, normed_ptr, scale_ptr, scale_stride, row, vector, is_vector, eps,
    SIZE: tl.constexpr, GROUP: tl.constexpr, VECTORS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores the norm of a row of the stream, rounded to its dtype.

    Unless scale_ptr is None it is then rounded to FP8, with a scale for each GROUP features. Groups
    are scale_stride scales apart.
    """
    total = elements(words, DTYPE)
    scale = tl.rsqrt(tl.sum(square_sum(total), 0) / SIZE + eps)
    scale = scale + tl.zeros([VECTORS], tl.float32)
    scales = (scale, scale, scale, scale, scale, scale, scale, scale)
    weight = elements(load_words(weight_ptr.to(tl.int64) + vector * 16, is_vector), DTYPE)
    normed = words_of(multiplied(multiplied(total, scales), weight), DTYPE)
    at = row * SIZE + vector * 8
    if scale_ptr is None:
        store_words(normed_ptr.to(tl.int64) + at * 2, normed, is_vector)
    else:
        WIDTH: tl.constexpr = GROUP // 8 if GROUP < SIZE else VECTORS
        NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        exact = elements(normed, DTYPE)
        # The operations of the quantize kernel, on tensors too: a scalar's quotient may differ.
        groups = tl.reshape(largest(exact), (VECTORS // WIDTH, WIDTH))
        scale = tl.maximum(tl.max(groups, 1), _SMALLEST_AMAX) / _FP8_MAX
        group = tl.arange(0, VECTORS // WIDTH)
        tl.store(scale_ptr + group * scale_stride + row, scale, mask=group < NUM_GROUPS)
        scale = tl.reshape(tl.broadcast_to(scale[:, None], (VECTORS // WIDTH, WIDTH)), (VECTORS,))
        a, b, c, d, e, f, g, h = exact
        low = _rounded(a, scale, 0) | _rounded(b, scale, 8)
        low |= _rounded(c, scale, 16) | _rounded(d, scale, 24)
        high = _rounded(e, scale, 0) | _rounded(f, scale, 8)
        high |= _rounded(g, scale, 16) | _rounded(h, scale, 24)
        store_bytes(normed_ptr.to(tl.int64) + at, low, high, is_vector)


@triton.jit
def _rounded(x, scale, SHIFT: tl.constexpr):
    """Returns x / scale in FP8, as a byte of a word."""
    scaled = tl.minimum(tl.maximum(x / scale, -_FP8_MAX), _FP8_MAX)
    byte = scaled.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    return (byte.to(tl.int32) & 0xFF) << SHIFT
