"""Writes latent vectors into the paged cache, and reads them."""

import torch

from models.kv_cache import LatentCacheData
from models.operands.latent_entries import LatentEntries
from models.ops.attention.index_rounding import quantize_index
from models.ops.attention.kv_cache import quantize_heads


def write_latents(
    cache: LatentCacheData, entries: LatentEntries, slot_mapping: torch.Tensor
) -> None:
    """Stores each token's entry in its slot: [at most T] int64.

    Padding tokens have slots in the null block 0, which nothing reads, or are past the end of
    slot_mapping and are skipped.
    """
    num_tokens = len(slot_mapping)
    latent = entries.latent[:num_tokens]
    if cache.latent_scale is not None:
        latent, scales = quantize_heads(latent)
        cache.latent_scale.flatten().index_copy_(0, slot_mapping, scales)
    _store(cache.latent, latent, slot_mapping)
    _store(cache.rotated, entries.rotated[:num_tokens, 0], slot_mapping)
    if entries.index_keys is not None and cache.index_keys is not None:
        keys = entries.index_keys[:num_tokens]
        if cache.index_scale is not None:
            keys, scales = quantize_index(keys)
            cache.index_scale.flatten().index_copy_(0, slot_mapping, scales)
        _store(cache.index_keys, keys, slot_mapping)


def read_latents(
    cache: LatentCacheData, block_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latent vectors [n, B, C] and rotated elements [n, B, P] of n blocks, of `dtype`."""
    latent, rotated = cache.latent[block_ids], cache.rotated[block_ids]
    if cache.latent_scale is not None:
        latent = latent.float() * cache.latent_scale[block_ids].unsqueeze(-1)
    return latent.to(dtype), rotated.to(dtype)


def _store(stored: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Copies rows to slots, rounded to the dtype of the cache."""
    values = values.to(stored.dtype)
    if stored.itemsize == 1:
        # Torch copies bytes by index on every device, FP8 only on some.
        stored, values = stored.view(torch.uint8), values.view(torch.uint8)
    stored.flatten(0, 1).index_copy_(0, slot_mapping, values)
