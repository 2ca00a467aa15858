"""Latent attention with expanded keys and values: the reference of its kernel."""

import torch

from models.forward_context import AttentionGroup
from models.kernels.attention.latent.latent_forms import keys_at_once
from models.kv_cache import LatentCacheData
from models.operands.latent_queries import LatentQueries
from models.ops.attention.latent_cache import read_latents
from models.ops.attention.unseen_keys import clear_unseen


def gathered_entries(
    cache: LatentCacheData, group: AttentionGroup, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latent vectors and rotated elements of each request of a group, unseen ones zero.

    They are [G, L, C] and [G, L, P] of `dtype`.
    """
    block_size = cache.latent.shape[1]
    latent, rotated = (
        blocks.view(group.num_requests, -1, blocks.shape[-1])
        for blocks in read_latents(cache, group.block_ids, dtype)
    )
    for entries in (latent, rotated):
        clear_unseen(entries, group.mask, block_size)
    return latent, rotated


def attend_expanded(
    queries: LatentQueries,
    cache: LatentCacheData,
    group: AttentionGroup,
    output: torch.Tensor,
    scale: float,
) -> None:
    """Computes one group with keys and values that are expanded from the cache, piece by piece.

    A piece continues the softmax of those before it. output: [G * Q, H, V], overwritten.
    """
    sizes, num_heads = queries.sizes, queries.plain.shape[1]
    latent, shared = gathered_entries(cache, group, queries.plain.dtype)
    num_requests, num_keys, _ = latent.shape
    at_once = keys_at_once(
        sizes,
        num_heads=num_heads * num_requests,
        itemsize=output.itemsize,
        block_size=cache.latent.shape[1],
    )
    exact = torch.promote_types(output.dtype, torch.float32)
    by_head = (num_requests, group.num_queries, num_heads, -1)
    plain, rotated = (x.reshape(by_head).transpose(1, 2) for x in (queries.plain, queries.rotated))
    shape = plain.shape[:3]
    highest = torch.full((*shape, 1), -torch.inf, dtype=exact, device=output.device)
    total, attended = torch.zeros_like(highest), highest.new_zeros(*shape, sizes.value)
    for first in range(0, num_keys, at_once):
        piece = slice(first, first + at_once)
        expanded = queries.keys_and_values(latent[:, piece].flatten(0, 1))
        expanded = expanded.view(num_requests, -1, *expanded.shape[1:]).transpose(1, 2)
        keys, values = torch.split(expanded, [sizes.plain, sizes.value], dim=-1)
        by_position = (rotated @ shared[:, None, piece].mT).to(exact)
        scores = (plain @ keys.mT).to(exact) + by_position
        mask = group.mask[..., piece]
        scores = (scores * scale).masked_fill(~mask, -torch.inf)
        # Finite, as a row may see no key of a piece and inf - inf is NaN.
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True)).clamp(min=-1e30)
        weights = (scores - new_highest).exp()
        kept = (highest - new_highest).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        attended = attended * kept + (weights.to(values.dtype) @ values).to(exact)
        highest = new_highest
    result = (attended / total).transpose(1, 2).flatten(0, 1)
    output.copy_(result)
