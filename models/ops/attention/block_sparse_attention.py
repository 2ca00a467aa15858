"""Attention to chosen blocks of keys: octavo::block_sparse_attention_with_output.

Like models.ops.attention.attention it has no output and writes into its caller's tensor.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionGroup, get_forward_context
from models.kernels.gpu import has_kernels
from models.kv_cache import KVCacheData
from models.operands.block_index import BlockIndex
from models.operands.ordered_choice import ordered_choice
from models.ops.attention.attention import attend_group
from models.ops.attention.kv_cache import write_kv_cache
from models.ops.attention.queries_alone import queries_alone
from models.ops.custom_op import operator


@operator(mutates=("output",))
def block_sparse_attention_with_output(  # noqa: PLR0913  # an operator takes no dataclasses
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    layer_index: int,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    block_size: int,
    top_blocks: int,
    local_blocks: int,
    scale: float,
) -> None:
    """Stores the step's keys and values, then attends each query to the blocks that it chooses.

    A sequence's keys form blocks of block_size. A block's score, for a query and a kv head, is the
    highest product of the index's query and the index's keys of the block up to the query's own.
    The query heads of a kv head attend to the keys up to their own in the top_blocks of the highest
    scores, among which the last local_blocks always are. Metadata and cache come from the forward
    context. Tokens past the end of slot_mapping are padding: their output is undefined.
    T tokens, Hq/Hk query/kv heads, D head dim, I elements of the index's heads.

    q, output: [T, Hq, D], contiguous.
    k, v: [T, Hk, D], each token's heads contiguous.
    index_q: [T, Hk, I], contiguous. index_k: [T, I], cached for each token.
    scale: factor of the scores of attention.

    Source: transformers 5.24, models/minimax_m3_vl, MiniMaxM3VLIndexer.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, KVCacheData), f"layer {layer_index} caches no keys and values"
    _write_index_keys(cache, index_k, metadata.slot_mapping)
    index = BlockIndex(
        q=index_q, block_size=block_size, top_blocks=top_blocks, local_blocks=local_blocks
    )
    if has_kernels(q.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.attention.block_sparse.block_sparse_attention import attend

        attend(q, k, v, output, cache, metadata, index, scale, is_invariant=is_batch_invariant())
        return
    write_kv_cache(cache, k, v, metadata.slot_mapping)
    if is_batch_invariant():
        for query, group in queries_alone(q, metadata.groups, cache.k.shape[1]):
            tokens = group.tokens
            mask = _chosen(replace(index, q=index_q[tokens].clone()), cache, group)
            attend_group(query, cache, group, mask, output[tokens], None, scale, 0.0)
        return
    for group in metadata.groups:
        tokens = group.tokens
        mask = _chosen(index.of(tokens), cache, group)
        if group.num_queries > 1:
            mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], dim=1)
        attend_group(q[tokens], cache, group, mask, output[tokens], None, scale, 0.0)


def _write_index_keys(cache: KVCacheData, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Stores each token's key of the index, [T, I], in its slot."""
    assert cache.index_keys is not None, "an index caches its keys"
    stored = cache.index_keys.flatten(0, 1)
    stored.index_copy_(0, slot_mapping, keys[: len(slot_mapping)].to(stored.dtype))


def _chosen(index: BlockIndex, cache: KVCacheData, group: AttentionGroup) -> torch.Tensor:
    """Returns which keys the queries of a group choose for each kv head: [G, Hk, Q, L] bool."""
    assert cache.index_keys is not None, "an index caches its keys"
    num_requests, num_queries, num_keys = group.num_requests, group.num_queries, group.mask.shape[3]
    dtype = torch.promote_types(index.q.dtype, torch.float32)
    queries = index.q.view(num_requests, num_queries, *index.q.shape[1:]).transpose(1, 2).to(dtype)
    keys = cache.index_keys[group.block_ids].view(num_requests, 1, num_keys, -1).to(dtype)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).masked_fill(~group.mask, -torch.inf)
    scores = functional.pad(scores, (0, -num_keys % index.block_size), value=-torch.inf)
    by_block = scores.view(*scores.shape[:3], -1, index.block_size).amax(-1)
    num_blocks = by_block.shape[-1]
    own = group.mask.sum(-1, keepdim=True).sub(1).div(index.block_size, rounding_mode="floor")
    numbers = torch.arange(num_blocks, device=scores.device)
    is_local = (numbers <= own) & (numbers > own - index.local_blocks)
    by_block = by_block.masked_fill(is_local, torch.inf)
    count = min(index.top_blocks, num_blocks)
    best = ordered_choice(by_block, count) if is_batch_invariant() else by_block.topk(count).indices
    chosen = torch.zeros(by_block.shape, dtype=torch.bool, device=scores.device)
    chosen = chosen.scatter(-1, best, value=True)
    return chosen.repeat_interleave(index.block_size, -1)[..., :num_keys] & group.mask
