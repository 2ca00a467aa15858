"""Attention to cached latent vectors: octavo::latent_attention_with_output.

Like models.ops.attention.attention it has no output and writes into its caller's tensor.
"""

from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionGroup, get_forward_context
from models.kernels.attention.latent.latent_forms import least_expanded_queries
from models.kernels.gpu import has_kernels
from models.kv_cache import LatentCacheData
from models.operands.index_queries import IndexQueries
from models.operands.latent_entries import LatentEntries, LatentTransform
from models.operands.latent_queries import LatentQueries
from models.operands.ordered_choice import ordered_choice
from models.ops.attention.attention import with_sinks
from models.ops.attention.expanded_attention import attend_expanded, gathered_entries
from models.ops.attention.index_rounding import quantize_index
from models.ops.attention.latent_cache import write_latents
from models.ops.attention.latent_transform import transform_latents
from models.ops.attention.queries_alone import queries_alone
from models.ops.custom_op import operator


@operator(mutates=("output",))
def latent_attention_with_output(  # noqa: PLR0913  # an operator takes no dataclasses
    q_plain: torch.Tensor,
    q_rotated: torch.Tensor,
    latent: torch.Tensor,
    k_rotated: torch.Tensor,
    projections: torch.Tensor,
    output: torch.Tensor,
    layer_index: int,
    scale: float,
    index_q: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    top_k: int = 0,
    sinks: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    signed_sin: torch.Tensor | None = None,
    latent_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Stores the step's latent vectors, then attends each query to its sequence's.

    A head's key is what the projection to keys makes of the C latent elements of an entry, and the
    P rotated elements, which all heads share; its value is what the projection to values makes. The
    absorbed form applies the projections to queries and to attended latent vectors; the expanded
    form applies them to the cached entries. In batch-invariant mode all requests take the absorbed
    form; else models.kernels.attention.latent.latent_forms chooses, by the number of a request's
    query tokens.

    Metadata and cache come from the forward context. Tokens past the end of slot_mapping are
    padding: their output is undefined. With an index each query attends to the top_k tokens of the
    highest score: the sum over the index's heads of weight * relu(query * key); where the cache is
    FP8, queries and keys of the index are rounded to FP8. With top_k alone it attends to the tokens
    that the last layer with an index chose. Given cos, signed_sin and latent_weight
    it first normalises latent vectors and rotates q_rotated and k_rotated.
    T tokens, H heads, N, P and V elements of unrotated and rotated keys and of values, J heads of
    size D of the index. Index tensors and projections are contiguous; of the others each head's
    elements are.

    q_plain: [T, H, N]. q_rotated: [T, H, P].
    latent: [T, C] and k_rotated: [T, 1, P], cached for each token.
    projections: [H * (N + V), C]; each head's rows make first its key, then its value.
    output: [T, H, V], overwritten.
    scale: factor of the scores.
    index_q: [T, J, D]; None without an index.
    index_k: [T, D], cached for each token.
    index_weights: [T, J] float32.
    sinks: [H], scores that join each head's softmax without a key; or None, as without top_k.
    cos, signed_sin: [T, 1, P], or None: the tensors above are normalised and rotated.
    latent_weight: [C], of the norm with `eps`.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", appendix C; 2025, "DeepSeek-V3.2-Exp", section 2.1.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, LatentCacheData), f"layer {layer_index} caches no latent vectors"
    entries = LatentEntries(latent=latent, rotated=k_rotated, index_keys=index_k)
    index = None
    if index_q is not None and index_weights is not None:
        assert cache.index_keys is not None, f"layer {layer_index} caches no keys of an index"
        index = IndexQueries(q=index_q, weights=index_weights, top_k=top_k)
    transform = _transform(cos, signed_sin, latent_weight, eps)
    assert sinks is None or top_k, "other forms of the operator have no sinks"
    if is_batch_invariant():
        if transform is not None:
            q_rotated, entries = transform_latents(q_rotated, entries, transform)
        queries = LatentQueries(plain=q_plain, rotated=q_rotated, projections=projections)
        _attend_invariantly(
            queries, entries, output, layer_index, scale, index, sinks, chooses=bool(top_k)
        )
        return
    if has_kernels(latent.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.attention.latent.latent_steps import attend

        queries = LatentQueries(plain=q_plain, rotated=q_rotated, projections=projections)
        is_prefill = context.context.is_prefill
        attend(
            queries, entries, transform, cache, metadata, output, scale, index,
            context.index_choice if top_k else None, sinks, is_prefill=is_prefill,
        )  # fmt: skip
        return
    if transform is not None:
        q_rotated, entries = transform_latents(q_rotated, entries, transform)
    write_latents(cache, entries, metadata.slot_mapping)
    queries = LatentQueries(plain=q_plain, rotated=q_rotated, projections=projections)
    least = least_expanded_queries(queries.sizes)
    choice = context.index_choice
    if index is not None:
        choice.masks = tuple(
            _chosen(index.of(group.tokens), cache, group) for group in metadata.groups
        )
    for number, group in enumerate(metadata.groups):
        tokens = group.tokens
        own = queries.of(tokens)
        if top_k:
            _attend_absorbed(own, cache, group, output[tokens], scale, choice.masks[number], sinks)
        elif group.num_queries < least:
            _attend_absorbed(own, cache, group, output[tokens], scale, group.mask)
        else:
            attend_expanded(own, cache, group, output[tokens], scale)


def _transform(
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> LatentTransform | None:
    if cos is None or signed_sin is None or weight is None:
        return None
    return LatentTransform(cos=cos, signed_sin=signed_sin, weight=weight, eps=eps)


def _attend_invariantly(
    queries: LatentQueries,
    entries: LatentEntries,
    output: torch.Tensor,
    layer_index: int,
    scale: float,
    index: IndexQueries | None,
    sinks: torch.Tensor | None,
    *,
    chooses: bool,
) -> None:
    """Runs the operator, always in the absorbed form; each row has the bits that it has alone.

    Queries and entries are transformed by the operators of a model that is not compiled.
    chooses: whether queries attend to chosen tokens.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, LatentCacheData), "the operator checked it"
    choice = context.index_choice if chooses else None
    if has_kernels(output.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.attention.invariant.invariant_latents import attend

        attend(queries, entries, cache, metadata, output, scale, index, choice, sinks)
        return
    write_latents(cache, entries, metadata.slot_mapping)
    alone = list(queries_alone(queries.plain, metadata.groups, cache.latent.shape[1]))
    if choice is not None and index is not None:
        choice.masks = tuple(_chosen(index.alone(group.tokens), cache, group) for _, group in alone)
    masks = [group.mask for _, group in alone] if choice is None else choice.masks
    for (plain, group), mask in zip(alone, masks, strict=True):
        own = replace(queries, plain=plain, rotated=queries.rotated[group.tokens].clone())
        _attend_absorbed(own, cache, group, output[group.tokens], scale, mask, sinks)


def _attend_absorbed(
    queries: LatentQueries,
    cache: LatentCacheData,
    group: AttentionGroup,
    output: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Computes one group: gathers its blocks once and treats the heads as query tokens."""
    q = queries.absorbed()
    _, num_heads, size = q.shape
    keys = torch.cat(gathered_entries(cache, group, q.dtype), dim=-1).unsqueeze(1)
    values = keys[..., : queries.sizes.latent]
    rows = q.view(group.num_requests, 1, group.num_queries * num_heads, size)
    mask = mask.repeat_interleave(num_heads, dim=2)
    if sinks is not None:
        by_row = sinks.repeat(group.num_queries).view(1, 1, -1, 1)
        keys, values, mask = with_sinks(keys, values, mask, by_row)
    attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    output.copy_(queries.values(attended.reshape(*q.shape[:2], -1)))


def _chosen(index: IndexQueries, cache: LatentCacheData, group: AttentionGroup) -> torch.Tensor:
    """Returns which keys of a group the index chooses: [G, 1, Q, L] bool."""
    assert cache.index_keys is not None, "the operator checked it"
    keys, queries, weights = cache.index_keys[group.block_ids], index.q, index.weights
    if cache.index_scale is not None:
        queries, factors = quantize_index(queries)
        weights = weights * factors
    keys = keys.view(group.num_requests, 1, -1, keys.shape[-1]).float()
    queries = queries.view(group.num_requests, group.num_queries, *queries.shape[1:]).float()
    # [G, Q, J, D] and [G, 1, D, L] to [G, Q, J, L], and with weights [G, Q, 1, J] to [G, Q, 1, L].
    scores = torch.matmul(queries, keys.transpose(-1, -2)).relu()
    weights = weights.view(group.num_requests, group.num_queries, 1, -1)
    scores = torch.matmul(weights, scores).transpose(1, 2)
    if cache.index_scale is not None:
        scores = scores * cache.index_scale[group.block_ids].view(group.num_requests, 1, 1, -1)
    scores = scores.masked_fill(~group.mask, -torch.inf)
    count = min(index.top_k, scores.shape[-1])
    best = ordered_choice(scores, count) if is_batch_invariant() else scores.topk(count).indices
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return chosen.scatter(-1, best, value=True) & group.mask
