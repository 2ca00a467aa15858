"""The tensors of a layer's cache as one parameter of kernels."""

from typing import Any, NamedTuple

from models.kv_cache import KVCacheData


class Cache(NamedTuple):
    """Keys and values of a layer, [blocks, block_size, Hk, D], and the scales of their heads.

    In a kernel these are pointers.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


def cache_tensors(cache: KVCacheData) -> Cache:
    """Returns a cache's tensors; a cache without scales has stand-ins for them."""
    if cache.k_scale is None or cache.v_scale is None:
        return Cache(cache.k, cache.v, cache.k, cache.v)
    return Cache(cache.k, cache.v, cache.k_scale, cache.v_scale)
