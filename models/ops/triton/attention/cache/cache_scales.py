"""Scales of keys and values that the cache stores in FP8."""

import torch
import triton
import triton.language as tl

from models.kv_cache import SMALLEST_HEAD, KVCacheData
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


def cache_scales(cache: KVCacheData) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales of keys and of values; stand-ins for a cache without scales."""
    if cache.k_scale is None or cache.v_scale is None:
        return cache.k, cache.v
    return cache.k_scale, cache.v_scale
