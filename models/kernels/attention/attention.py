"""Attention of one layer on a GPU: chooses the kernels and their order."""

import torch

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.rotate_and_cache import rotate_and_cache
from models.kernels.attention.decode.decode_attention import decode_attention
from models.kernels.attention.decode.draft_attention import attend_drafts
from models.kernels.attention.decode.few_queries import attend_few_queries
from models.kernels.attention.decode.prefix_attention import NewTokens
from models.kernels.attention.prefill.prefill_attention import prefill_attention
from models.kv_cache import KVCacheData
from models.operands.head_transform import HeadTransform
from models.operands.rounded_activations import rounded_parts


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    transform: HeadTransform | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
    *,
    key_ends: torch.Tensor | None = None,
    rounds: bool = False,
) -> None:
    """Runs models.ops.attention.attention.unified_attention_with_output on a GPU.

    key_ends: [T] int32 of ImageMetadata, for this layer.
    """
    attended, attended_scale = rounded_parts(output) if rounds else (output, None)
    if transform is not None and metadata.max_seqlen_q == 1:
        new = NewTokens(k=k, v=v, transform=transform, slot_mapping=metadata.slot_mapping)
        decode_attention(
            q, cache, metadata, attended, new,
            output_scale=attended_scale, sliding_window=sliding_window, sinks=sinks, scale=scale,
            soft_cap=soft_cap,
        )  # fmt: skip
        return
    # The output holds the transformed queries at first: every program reads only its own queries,
    # and reads them before it overwrites them. Rounded results are elsewhere in its memory.
    queries = q
    if transform is not None:
        queries = torch.empty_like(output) if rounds else output
    # Chunks read keys and values as an 8-bit cache has them, so that their cut matters little.
    is_rounded = cache.k_scale is not None and metadata.max_seqlen_q > 1
    keys = None if transform is None and not is_rounded else k.new_empty(k.shape)
    values = v.new_empty(v.shape) if is_rounded else None
    rotate_and_cache(q, k, v, queries, keys, cache, metadata.slot_mapping, transform, kept_v=values)
    k, v = k if keys is None else keys, v if values is None else values
    has_single_tokens = metadata.max_seqlen_q == 1 or metadata.seq_lens.shape[0] > 1
    prefix = None
    if has_single_tokens:
        prefix = decode_attention(
            queries, cache, metadata, attended,
            output_scale=attended_scale, sliding_window=sliding_window, sinks=sinks, scale=scale,
            soft_cap=soft_cap,
        )  # fmt: skip
    if metadata.max_seqlen_q == 1:
        return
    min_queries = 2 if has_single_tokens else 1
    most_attended = 0
    if prefix is not None and prefix.plan.num_queries > 1 and key_ends is None:
        most_attended = attend_drafts(
            queries, cache, metadata, attended, prefix,
            output_scale=attended_scale, sinks=sinks, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
    elif key_ends is None:
        most_attended = attend_few_queries(
            queries, cache, metadata, attended,
            output_scale=attended_scale, min_queries=min_queries, sliding_window=sliding_window,
            sinks=sinks, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
    if metadata.max_seqlen_q > most_attended:
        prefill_attention(
            queries, k, v, cache, metadata, attended,
            output_scale=attended_scale, min_queries=max(min_queries, most_attended + 1),
            sliding_window=sliding_window, sinks=sinks, scale=scale, soft_cap=soft_cap,
            key_ends=key_ends,
        )  # fmt: skip
