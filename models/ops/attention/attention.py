"""Paged attention: octavo::unified_attention_with_output.

The operator has no output: it writes into a tensor that its caller made, so that a compiler can
split a model at it and the pieces around it keep fixed addresses.
"""

import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionGroup, get_forward_context
from models.kernels.gpu import has_kernels
from models.kv_cache import KVCacheData
from models.number_formats import BLOCK
from models.operands.head_transform import head_transform_of
from models.ops.attention.head_transform import transform_heads
from models.ops.attention.kv_cache import read_kv_cache, read_slots, write_kv_cache
from models.ops.attention.queries_alone import queries_alone
from models.ops.attention.seen_keys import seen_keys
from models.ops.attention.shared_prefixes import attend_shared
from models.ops.attention.unseen_keys import clear_unseen
from models.ops.custom_op import operator
from models.ops.products.activation_rounding import leaves_rounded
from models.ops.products.fp8_linear import round_in_place


@operator(mutates=("output",))
def unified_attention_with_output(  # noqa: PLR0913  # an operator takes no dataclasses
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    output: torch.Tensor,
    layer_index: int,
    cos: torch.Tensor | None = None,
    signed_sin: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    rounds: bool = False,
) -> None:
    """Stores the step's keys and values, then attends each query to its sequence's cache.

    Given cos and signed_sin it first rotates queries and keys; given the weights too, it normalises
    their heads before that. Metadata and cache come from the forward context. A step may mix
    prefill chunks and decodes. Tokens past the end of slot_mapping are padding: their output is
    undefined. Tokens may see later keys: ForwardContext.key_ends.
    T tokens, Hq/Hk query/kv heads, D head dim.

    q, output: [T, Hq, D], contiguous; a q to rotate only has each token's heads contiguous.
    k, v: [T, Hk, D], each token's heads contiguous. With a rotation, tokens of q, k and v are
        whole heads apart. None: the cache has those of the step.
    cos, signed_sin: [T, 1, D], parts of one table of rows of whole heads; or None: q and k are
        already rotated.
    q_weight, k_weight: [D], of the norms with `eps`, or None.
    sliding_window: keys that a query sees, its own and those before; None means all. Negative, -n:
        those from the last multiple of n up to its own position.
    sinks: [Hq], scores that join each head's softmax without a key; or None.
    scale: factor of the scores; None means 1 / sqrt(D).
    soft_cap: c > 0 makes each score s, scaled, c * tanh(s / c).
    rounds: the output may be rounded to FP8 in its own memory, as leaves_rounded says; D is 128.

    Source: Kwon et al. 2023, "PagedAttention", section 4.1; Gemma Team 2024, "Gemma 2", section 2.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, KVCacheData), f"layer {layer_index} caches no keys and values"
    if k is None or v is None:
        k, v = read_slots(cache, metadata.slot_mapping, len(q), q.dtype)
    key_ends = context.key_ends(sliding_window)
    transform = head_transform_of(cos, signed_sin, q_weight, k_weight, eps)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    assert not rounds or q.shape[2] == BLOCK, "each head has one scale"
    rounds = leaves_rounded(output, may_round=rounds)
    if has_kernels(q.device):
        # Imported on first use: a CPU installation has no Triton.
        if is_batch_invariant():
            from models.kernels.attention.invariant import invariant_attention as kernel

            if transform is not None and not kernel.takes_transform(q, transform):
                (q, k), transform = transform_heads(q, k, transform), None
            kernel.attend(
                q, k, v, output, cache, metadata, transform=transform,
                sliding_window=sliding_window, sinks=sinks, scale=scale, soft_cap=soft_cap,
            )  # fmt: skip
            return
        from models.kernels.attention.attention import attend

        attend(
            q, k, v, output, cache, metadata, transform, sliding_window, sinks, scale, soft_cap,
            key_ends=key_ends, rounds=rounds,
        )  # fmt: skip
        return
    if transform is not None:
        q, k = transform_heads(q, k, transform)
    write_kv_cache(cache, k, v, metadata.slot_mapping)
    if is_batch_invariant():
        for query, group in queries_alone(q, metadata.groups, cache.k.shape[1]):
            attended = output[group.tokens]
            mask = seen_keys(group, sliding_window)
            attend_group(query, cache, group, mask, attended, sinks, scale, soft_cap)
        return
    for group in metadata.groups:
        tokens = group.tokens
        mask = seen_keys(group, sliding_window, key_ends)
        attend_group(q[tokens], cache, group, mask, output[tokens], sinks, scale, soft_cap)
    attend_shared(q, cache, metadata, output, sliding_window, sinks, scale, soft_cap)
    if rounds:
        round_in_place(output)


def attend_group(
    q: torch.Tensor,
    cache: KVCacheData,
    group: AttentionGroup,
    mask: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> None:
    """Computes one group: gathers its blocks once, then calls torch's fused attention.

    mask: [G, 1, Q, L] bool, true where a query sees a key; or for every kv head, [G, Hk, Q, L].
    """
    num_requests, num_queries = group.num_requests, group.num_queries
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    # [G, L, Hk, D] -> [G, Hk, L, D]
    gathered = (num_requests, -1, num_kv_heads, head_dim)
    keys, values = (
        blocks.view(gathered) for blocks in read_kv_cache(cache, group.block_ids, q.dtype)
    )
    clear_unseen(keys, group.mask, cache.k.shape[1])
    clear_unseen(values, group.mask, cache.k.shape[1])
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if num_queries == 1:
        # Treating the query heads of a kv head as query tokens is 2 to 5 times as fast as
        # enable_gqa in bf16 on a CPU, a tenth faster in fp32 (torch 2.13, Hq 6, Hk 2, D 32).
        queries = q.view(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
    else:
        queries = q.view(num_requests, num_queries, num_heads, head_dim).transpose(1, 2)
    if sinks is not None:
        scores = sinks.view(1, queries.shape[1], -1, 1)
        keys, values, mask = with_sinks(keys, values, mask, scores)
    if soft_cap:
        attended = _soft_capped(queries, keys, values, mask, scale, soft_cap)
    else:
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=num_queries > 1
        )
    if num_queries > 1:
        attended = attended.transpose(1, 2)
    output.view(attended.shape).copy_(attended)


def _soft_capped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Attends with capped scores, which torch's fused attention cannot compute.

    Maps queries [G, Hq, Q, D], keys and values [G, Hk, L, D] and a mask [G, 1 or Hq, Q, L], of seen
    keys or to add to the capped scores, to [G, Hq, Q, D].
    """
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(repeats, 1) for x in (keys, values))
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = queries.to(dtype) @ keys.to(dtype).transpose(2, 3)
    scores = cap * torch.tanh(scores * (scale / cap))
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(values.dtype) @ values


def with_sinks(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Appends a key and value of zeros, to which every query gives the sink's score.

    Maps keys and values [G, Hk, L, D], mask [G, 1, Q, L] bool and scores [1, H, Q or 1, 1] to keys
    and values with L + 1 entries and a mask to add to the scores, [G, H, Q, L + 1].
    """
    keys, values = (functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    hidden = torch.zeros(mask.shape, dtype=keys.dtype, device=keys.device)
    hidden = hidden.masked_fill(~mask, -torch.inf)
    shape = (mask.shape[0], scores.shape[1], max(mask.shape[2], scores.shape[2]))
    return (
        keys,
        values,
        torch.cat((hidden.expand(*shape, -1), scores.to(keys.dtype).expand(*shape, -1)), dim=-1),
    )
