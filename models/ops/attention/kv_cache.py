"""Writes keys and values into the paged cache, and reads them."""

import torch
from torch.nn import functional

from models.kv_cache import FP8_CACHE_DTYPE, SMALLEST_HEAD, KVCacheData
from models.number_formats import FP8_MAX


def write_kv_cache(
    cache: KVCacheData, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores each token's key and value, [T, Hk, D], in its slot: [at most T] int64.

    Padding tokens have slots in the null block 0, which nothing reads, or are past the end of
    slot_mapping and are skipped.
    """
    num_tokens = slot_mapping.shape[0]
    for stored, scale, heads in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
        values = heads[:num_tokens]
        if scale is not None:
            values, scales = quantize_heads(values)
            scale.flatten(0, 1).index_copy_(0, slot_mapping, scales)
            # Torch copies bytes by index on every device, FP8 only on some.
            stored, values = stored.view(torch.uint8), values.view(torch.uint8)
        stored.flatten(0, 1).index_copy_(0, slot_mapping, values)


def read_kv_cache(
    cache: KVCacheData, block_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of n blocks, each [n, B, Hk, D] of `dtype`."""
    k, v = (
        _scaled(stored[block_ids], None if scale is None else scale[block_ids])
        for stored, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    return k.to(dtype), v.to(dtype)


def read_slots(
    cache: KVCacheData, slot_mapping: torch.Tensor, num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of a step's tokens, each [T, Hk, D] of `dtype`.

    Tokens past the end of slot_mapping are padding, and get zeros.
    """
    padding = (0, 0, 0, 0, 0, num_tokens - len(slot_mapping))
    k, v = (
        _scaled(
            stored.flatten(0, 1)[slot_mapping],
            None if scale is None else scale.flatten(0, 1)[slot_mapping],
        )
        for stored, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    return functional.pad(k.to(dtype), padding), functional.pad(v.to(dtype), padding)


def quantize_heads(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds heads [..., D], finite, to FP8 with scales [...] float32.

    A head's largest magnitude becomes FP8_MAX.
    """
    scales = heads.abs().amax(-1).float().clamp(min=SMALLEST_HEAD) / FP8_MAX
    return (heads / scales.unsqueeze(-1)).to(FP8_CACHE_DTYPE), scales


def _scaled(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return stored if scales is None else stored.float() * scales.unsqueeze(-1)
