"""Writes latent vectors into the paged cache, and reads them."""

import torch

from models.kv_cache import LatentCacheData
from models.ops.operands.latent_entries import LatentEntries


def write_latents(
    cache: LatentCacheData, entries: LatentEntries, slot_mapping: torch.Tensor
) -> None:
    """Stores each token's entry in its slot: [at most T] int64.

    Padding tokens have slots in the null block 0, which nothing reads, or are past the end of
    slot_mapping and are skipped.
    """
    stored = [(cache.latent, entries.latent), (cache.rotated, entries.rotated.squeeze(1))]
    if entries.index_keys is not None and cache.index_keys is not None:
        stored.append((cache.index_keys, entries.index_keys))
    for target, values in stored:
        target.flatten(0, 1).index_copy_(0, slot_mapping, values[: len(slot_mapping)])


def read_latents(
    cache: LatentCacheData, block_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latent vectors and rotated elements of n blocks: [n, B, C] and [n, B, P]."""
    return cache.latent.index_select(0, block_ids), cache.rotated.index_select(0, block_ids)
