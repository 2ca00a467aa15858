"""Paged attention: octavo::unified_attention_with_output.

The operator has no output: it writes into a tensor that its caller made, so that a compiler can
split a model at it and the pieces around it keep fixed addresses.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from models.forward_context import AttentionGroup, KVCacheData, get_forward_context
from models.ops.custom_op import direct_register_custom_op
from models.ops.kv_cache import write_kv_cache


def unified_attention_with_output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, layer_index: int
) -> None:
    """Stores the step's keys and values, then attends each query to its sequence's cache.

    Reads attn_metadata and kv_cache_data[layer_index] of the forward context. Prefill chunks and
    decodes may stand side by side. T tokens, Hq/Hk query/kv heads, D head dim.

    Args:
        q: [T, Hq, D], contiguous.
        k: [T, Hk, D].
        v: [T, Hk, D].
        output: [T, Hq, D], contiguous, overwritten.
        layer_index: which layer's cache.

    Source: Kwon et al. 2023, "PagedAttention", section 4.1.
    """
    context = get_forward_context()
    cache = context.kv_cache_data[layer_index]
    write_kv_cache(cache, k, v, context.attn_metadata.slot_mapping)
    for group in context.attn_metadata.groups:
        end = group.first_token + group.num_requests * group.num_queries
        _attend(q[group.first_token : end], cache, group, output[group.first_token : end])


def _attend(
    q: torch.Tensor, cache: KVCacheData, group: AttentionGroup, output: torch.Tensor
) -> None:
    """Computes one group: gathers its blocks once, then one call of torch's fused attention."""
    num_requests, num_queries = group.num_requests, group.num_queries
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    # [G, L, Hk, D] -> [G, Hk, L, D]
    gathered = (num_requests, -1, num_kv_heads, head_dim)
    keys = cache.k.index_select(0, group.block_ids).view(gathered).transpose(1, 2)
    values = cache.v.index_select(0, group.block_ids).view(gathered).transpose(1, 2)
    if num_queries == 1:
        # The query heads of a kv head stand in for query tokens: twice to five times as fast as
        # enable_gqa in bf16 on a CPU, a tenth faster in fp32 (torch 2.13, Hq 6, Hk 2, D 32).
        queries = q.view(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    else:
        queries = q.view(num_requests, num_queries, num_heads, head_dim).transpose(1, 2)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, enable_gqa=True
        ).transpose(1, 2)
    output.view(attended.shape).copy_(attended)


def _unified_attention_with_output_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, layer_index: int
) -> None:
    """Makes nothing: the operator has no output."""


direct_register_custom_op(
    "unified_attention_with_output",
    unified_attention_with_output,
    mutates_args=("output",),
    fake_impl=_unified_attention_with_output_fake,
)
