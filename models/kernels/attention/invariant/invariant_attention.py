"""Attention of batch-invariant mode: chooses the kernels.

Where hopper_attention takes the heads, invariant_parts computes short requests and hopper_attention
the others, with the same bits: online_softmax.weigh_keys says why. So which of them computes a row
may depend on the step.
"""

import torch

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.rotate_and_cache import rotate_and_cache
from models.kernels.attention.configurations import PART, hopper_tiles, invariant_tiles
from models.kernels.attention.invariant.invariant_parts import attend_parts, tile_queries
from models.kernels.attention.prefill.hopper_attention import hopper_attention
from models.kernels.launching.copy_engine import aligned_heads
from models.kernels.tuning.tiles import AttentionTiles
from models.kv_cache import KVCacheData
from models.operands.head_transform import HeadTransform


def takes_transform(q: torch.Tensor, transform: HeadTransform) -> bool:
    """Returns whether `attend` has the bits of the operators that a transform replaces.

    A model that is not compiled calls those. Products of two elements must be exact in float32, so
    that the compiler's choice to round them or not makes no difference.
    """
    return q.itemsize == transform.cos.itemsize == 2


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    *,
    transform: HeadTransform | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> None:
    """Runs models.ops.attention.attention.unified_attention_with_output on a GPU.

    All keys have the bits of the cache. Launches may be captured. T tokens, R requests, Hq/Hk
    query/kv heads, D head dim.
    """
    num_requests, (block_size, num_kv_heads) = len(metadata.seq_lens), cache.k.shape[1:3]
    tiles = _tiles(q, cache, num_requests * num_kv_heads)
    few = tile_queries(tiles, q.shape[1] // num_kv_heads)
    hopper = least = None
    if metadata.max_seqlen_q > few:
        is_plain = not soft_cap and (sliding_window or 0) >= 0
        if metadata.workspace is not None and is_plain:
            hopper = hopper_tiles(q, cache.k.dtype, block_size, num_kv_heads, has_parts=True)
        if hopper is None:
            tiles = _tiles(q, cache, 0)
        else:
            least = 1 if num_requests == 1 else few + 1
    q, k = _stored(q, k, v, output, cache, metadata, transform, needs_keys=least is not None)
    if least != 1:
        attend_parts(
            q, output, cache, metadata, tiles, skips_longer=least is not None,
            sliding_window=sliding_window, sinks=sinks, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
    if hopper is not None and least is not None and metadata.workspace is not None:
        hopper_attention(
            q, aligned_heads(k), aligned_heads(v), cache, metadata, output,
            metadata.workspace.counters, hopper, min_queries=least, sliding_window=sliding_window,
            output_scale=None, sinks=sinks, scale=scale, part=PART,
        )  # fmt: skip


def _tiles(q: torch.Tensor, cache: KVCacheData, num_pairs: int) -> AttentionTiles:
    padded_head_dim = max(16, 1 << (q.shape[2] - 1).bit_length())
    return invariant_tiles(
        q.dtype, cache.k.dtype, padded_head_dim, num_pairs=num_pairs, device=q.device
    )


def _stored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    transform: HeadTransform | None,
    *,
    needs_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores the step's keys and values; returns its queries, transformed and contiguous, and keys.

    needs_keys: keys are transformed too.
    """
    slots = metadata.slot_mapping
    if transform is None:
        q = q.contiguous()
        rotate_and_cache(q, k, v, q, None, cache, slots, None)
        return q, k
    keys = k.new_empty(k.shape) if needs_keys else None
    # The output holds the queries at first: a program overwrites its own after all have read them.
    rotate_and_cache(q, k, v, output, keys, cache, slots, transform, rounds=True)
    return output, k if keys is None else keys
