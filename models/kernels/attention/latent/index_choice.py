"""The indexer of sparse attention: chooses which of its sequence's tokens each query attends to."""

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.request_search import request_of
from models.kv_cache import LatentCacheData
from models.operands.index_queries import IndexQueries
from models.operands.ordered_choice import ordered_choice

MOST_SCORES = 2**26
"""Most scores at once, 256 MB; longer steps are scored in runs of tokens."""

_KEYS = 64
_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "first_token", "num_scores",
]  # fmt: skip  # specialising on these would compile again while serving


@triton.jit(do_not_specialize=_METADATA)
def _score_kernel(
    q_ptr, weights_ptr, keys_ptr, scale_ptr, scores_ptr, block_tables_ptr, seq_lens_ptr,
    query_start_ptr, table_stride, num_requests, first_token, num_scores,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores KEYS tokens for one query; keys that it does not see get minus infinity.

    With scale_ptr queries and keys are FP8, and the weights have the queries' scales.
    """
    row = tl.program_id(1)
    token = first_token + row
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    request = request_of(token, query_start_ptr, num_requests)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    num_keys = tl.load(seq_lens_ptr + request) - num_queries + token - query_start + 1
    # Padding after the last request sees nothing.
    num_keys = tl.where(token - query_start < num_queries, num_keys, 0)
    is_key = keys < num_keys
    scores = tl.full([KEYS], float("-inf"), tl.float32)
    if tl.program_id(0) * KEYS < num_keys:
        heads = tl.arange(0, BLOCK_H)
        dims = tl.arange(0, BLOCK_D)
        is_head = heads < NUM_HEADS
        in_head = (dims < SIZE)[None, :]
        at_heads = token.to(tl.int64) * NUM_HEADS + heads
        q = tl.load(
            q_ptr + at_heads[:, None] * SIZE + dims[None, :],
            mask=is_head[:, None] & in_head,
            other=0.0,
        )
        weights = tl.load(weights_ptr + at_heads, mask=is_head, other=0.0)
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = block * BLOCK_SIZE + keys % BLOCK_SIZE
        at_keys = slots[:, None] * SIZE + dims[None, :]
        k = tl.load(keys_ptr + at_keys, mask=is_key[:, None] & in_head, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        summed = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
        if scale_ptr is not None:
            summed *= tl.load(scale_ptr + slots, mask=is_key, other=0.0)
        scores = tl.where(is_key, summed, scores)
    at = row.to(tl.int64) * num_scores + keys
    tl.store(scores_ptr + at, scores, mask=keys < num_scores)


def choose_keys(
    index: IndexQueries,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    *,
    is_invariant: bool = False,
) -> torch.Tensor | None:
    """Returns the positions that each query attends to: [T, top_k] int32.

    A query that sees fewer keys also gets positions that it does not see. None if no sequence can
    be longer than top_k. The host reads nothing.
    index: of an FP8 cache, rounded to FP8.
    cache: has this step's keys.
    is_invariant: the positions that a query sees come first and rise, whatever the step; never
        None.
    """
    keys = cache.index_keys
    assert keys is not None, "an indexer has keys"
    block_size, size = keys.shape[1:]
    num_scores = metadata.block_tables.shape[1] * block_size
    num_tokens, num_heads, _ = index.q.shape
    if num_scores <= index.top_k:
        every = torch.arange(index.top_k, dtype=torch.int32, device=keys.device)
        return every.expand(num_tokens, -1).contiguous() if is_invariant else None
    chosen = torch.empty(num_tokens, index.top_k, dtype=torch.int32, device=keys.device)
    # Sorting takes several times the memory of the scores.
    run = max(1, MOST_SCORES // (num_scores * (4 if is_invariant else 1)))
    for first in range(0, num_tokens, run):
        count = min(run, num_tokens - first)
        scores = torch.empty(count, num_scores, dtype=torch.float32, device=keys.device)
        _score_kernel[(triton.cdiv(num_scores, _KEYS), count)](
            index.q, index.weights, keys, cache.index_scale, scores, metadata.block_tables,
            metadata.seq_lens, metadata.query_start_loc, metadata.block_tables.stride(0),
            metadata.seq_lens.shape[0], first, num_scores,
            NUM_HEADS=num_heads, SIZE=size, BLOCK_SIZE=block_size, KEYS=_KEYS,
            BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
            BLOCK_D=max(32 // keys.itemsize, 16, triton.next_power_of_2(size)), num_warps=4,
        )  # fmt: skip
        if is_invariant:
            best = ordered_choice(scores, index.top_k)
        else:
            best = scores.topk(index.top_k, dim=-1, sorted=False).indices
        chosen[first : first + count].copy_(best)
    return chosen
