"""Rounds queries and keys of an indexer to FP8, inside latent_cache."""

import triton
import triton.language as tl

from models.number_formats import FP8_MAX, SMALLEST_INDEX_AMAX

_INVERSE_MAX = tl.constexpr(1 / FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_INDEX_AMAX)


@triton.jit
def power_scale_of(largest):
    """Returns the scale of rows of these largest magnitudes, and its inverse: powers of two.

    To the bits of models.ops.attention.index_rounding.quantize_index.
    """
    bits = (tl.maximum(largest, _SMALLEST_AMAX) * _INVERSE_MAX).to(tl.int32, bitcast=True)
    power = (bits + 0x7FFFFF) & 0x7F800000
    # The exponents of a power of two and of its inverse add up to twice the bias of 127.
    inverse = (254 << 23) - power
    return power.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def store_index_key(
    token, slot, key_ptr, cache_ptr, scale_ptr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Stores a token's key in its slot; without scale_ptr it is not rounded to FP8."""
    dims = tl.arange(0, BLOCK_D)
    key = tl.load(key_ptr + token * SIZE + dims, mask=dims < SIZE, other=0.0)
    if scale_ptr is not None:
        exact = key.to(tl.float32)
        scale, inverse = power_scale_of(tl.max(tl.abs(exact), 0))
        tl.store(scale_ptr + slot, scale)
        key = (exact * inverse).to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + slot * SIZE + dims, key, mask=dims < SIZE)


@triton.jit
def round_index_queries(
    token, tile, q_ptr, weights_ptr, rounded_ptr, rounded_weights_ptr,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rounds HEADS of a token's queries to FP8; their scales become factors of the weights."""
    heads = tile * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    rows = token * NUM_HEADS + heads
    dims = tl.arange(0, BLOCK_D)[None, :]
    at = rows[:, None] * SIZE + dims
    in_tile = is_head[:, None] & (dims < SIZE)
    q = tl.load(q_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
    scale, inverse = power_scale_of(tl.max(tl.abs(q), 1))
    rounded = (q * inverse[:, None]).to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + at, rounded, mask=in_tile)
    weights = tl.load(weights_ptr + rows, mask=is_head, other=0.0)
    tl.store(rounded_weights_ptr + rows, weights * scale, mask=is_head)
