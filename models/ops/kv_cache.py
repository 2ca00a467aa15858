"""Writes keys and values into the paged cache."""

import torch

from models.forward_context import KVCacheData


def write_kv_cache(
    cache: KVCacheData, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores each token's key and value in its slot.

    Padding tokens have slots in the null block 0, which nothing reads, or lie past the end of
    slot_mapping and are left out.

    Args:
        cache: one layer's cache, changed in place.
        k: [T, Hk, D].
        v: [T, Hk, D].
        slot_mapping: [at most T] int64, block id * B + offset.
    """
    num_tokens = slot_mapping.shape[0]
    cache.k.flatten(0, 1).index_copy_(0, slot_mapping, k[:num_tokens])
    cache.v.flatten(0, 1).index_copy_(0, slot_mapping, v[:num_tokens])
