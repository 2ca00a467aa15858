"""The index of blocks: chooses which blocks of its sequence's keys each query attends to."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kernels.attention.latent.index_choice import MOST_SCORES
from models.kernels.attention.request_search import request_of_tile
from models.operands.block_index import BlockIndex
from models.operands.ordered_choice import ordered_choice

_ROWS, _MANY_ROWS = 16, 64
"""Queries of all heads that share a tile of keys, in steps of single tokens and in others."""
_MOST_BYTES = 512
"""Most bytes of keys of which 64 fit beside 64 queries into the shared memory of all cards."""
_METADATA = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_requests",
    "first_token", "num_tokens", "num_blocks",
]  # fmt: skip  # specialising on these would compile again while serving


class ChoiceForm(NamedTuple):
    """All that a build is made for.

    num_heads, padded_heads: query heads of the index, and a power of two that holds them.
    size: elements of a key; block_d: a power of two that holds one.
    block_size: slots of a block of the cache.
    block_tokens, local_blocks: of BlockIndex.
    queries, keys: of a tile.
    """

    num_heads: int
    padded_heads: int
    size: int
    block_d: int
    block_size: int
    block_tokens: int
    local_blocks: int
    queries: int
    keys: int


@triton.jit
def _highest_products(q, keys_ptr, table_ptr, first, end, ends, form: tl.constexpr):
    """Returns the highest product of each row of q and the keys from first to its end.

    ends: [rows], where the keys that a row sees end; end: the last of them, or of the block.
    """
    dims = tl.arange(0, form.block_d)
    highest = tl.full([form.queries * form.padded_heads], float("-inf"), tl.float32)
    for start in range(first, end, form.keys):
        keys = start + tl.arange(0, form.keys)
        is_key = keys < end
        block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
        slots = block * form.block_size + keys % form.block_size
        k = tl.load(
            keys_ptr + slots[:, None] * form.size + dims[None, :],
            mask=is_key[:, None] & (dims < form.size)[None, :],
            other=0.0,
        )
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        is_seen = is_key[None, :] & (keys[None, :] < ends[:, None])
        highest = tl.maximum(highest, tl.max(tl.where(is_seen, products, float("-inf")), 1))
    return highest


@triton.jit(do_not_specialize=_METADATA)
def _score_blocks_kernel(
    q_ptr, keys_ptr, scores_ptr, block_tables_ptr, seq_lens_ptr, query_start_ptr, table_stride,
    num_requests, first_token, num_tokens, num_blocks, form: tl.constexpr,
):  # fmt: skip
    """Scores one block for neighbouring tokens of a request, as many as there are from first_token.

    Blocks that a token does not see get minus infinity, and its local ones infinity.
    """
    number = tl.program_id(0) % num_blocks
    tile = tl.program_id(0) // num_blocks
    request = request_of_tile(tile, query_start_ptr, num_requests, form.queries)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    num_cached = tl.load(seq_lens_ptr + request) - num_queries
    first_query = (tile - query_start // form.queries - request) * form.queries
    rows = tl.arange(0, form.queries * form.padded_heads)
    queries = first_query + rows // form.padded_heads
    head = rows % form.padded_heads
    tokens = query_start + queries - first_token
    is_row = (queries < num_queries) & (head < form.num_heads)
    is_row = is_row & (tokens >= 0) & (tokens < num_tokens)
    ends = tl.where(is_row, num_cached + queries + 1, 0)
    own = (ends - 1) // form.block_tokens
    is_local = (number <= own) & (number > own - form.local_blocks)
    first = number * form.block_tokens
    end = tl.minimum(first + form.block_tokens, tl.max(ends, 0))
    dims = tl.arange(0, form.block_d)
    at = (first_token + tokens.to(tl.int64)) * form.num_heads + head
    q = tl.load(
        q_ptr + at[:, None] * form.size + dims[None, :],
        mask=is_row[:, None] & (dims < form.size)[None, :],
        other=0.0,
    )
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    scores = _highest_products(q, keys_ptr, table_ptr, first, end, ends, form)
    scores = tl.where(is_local, float("inf"), scores)
    at_scores = (tokens.to(tl.int64) * form.num_heads + head) * num_blocks + number
    tl.store(scores_ptr + at_scores, scores, mask=is_row)


def choose_blocks(
    index: BlockIndex, keys: torch.Tensor, metadata: AttentionMetadata, *, is_invariant: bool
) -> torch.Tensor | None:
    """Returns the numbers of the blocks that each query attends to: [T, H, top] int32.

    A query that sees fewer blocks also gets some that it does not see. None if no sequence can have
    more than top_blocks. The host reads nothing.

    keys: of the index, [N, B, I], with this step's.
    is_invariant: the blocks that a query sees come first and rise, whatever the step; never None.
    """
    block_size, size = keys.shape[1:]
    num_keys = metadata.block_tables.shape[1] * block_size
    num_blocks = triton.cdiv(num_keys, index.block_size)
    num_tokens, num_heads, _ = index.q.shape
    shape = num_tokens, num_heads, index.top_blocks
    if num_blocks <= index.top_blocks:
        every = torch.arange(index.top_blocks, dtype=torch.int32, device=keys.device)
        return every.expand(shape).contiguous() if is_invariant else None
    num_requests = metadata.seq_lens.shape[0]
    padded_heads = triton.next_power_of_2(num_heads)
    # With more rows, tensor cores would take other instructions.
    rows = _ROWS if metadata.max_seqlen_q == 1 or is_invariant else _MANY_ROWS
    block_d = max(16, triton.next_power_of_2(size))
    form = ChoiceForm(
        num_heads=num_heads, padded_heads=padded_heads, size=size, block_d=block_d,
        block_size=block_size, block_tokens=index.block_size, local_blocks=index.local_blocks,
        queries=max(1, rows // padded_heads),
        keys=64 if index.q.itemsize * block_d <= _MOST_BYTES else 16,
    )  # fmt: skip
    chosen = torch.empty(shape, dtype=torch.int32, device=keys.device)
    # Sorting takes several times the memory of the scores.
    run = max(1, MOST_SCORES // (num_heads * num_blocks * (4 if is_invariant else 1)))
    for first in range(0, num_tokens, run):
        count = min(run, num_tokens - first)
        scores = torch.empty(count, num_heads, num_blocks, dtype=torch.float32, device=keys.device)
        _score_blocks_kernel[(num_blocks * (num_tokens // form.queries + num_requests),)](
            index.q, keys, scores, metadata.block_tables, metadata.seq_lens,
            metadata.query_start_loc, metadata.block_tables.stride(0), num_requests, first, count,
            num_blocks, form=form, num_warps=4,
        )  # fmt: skip
        if is_invariant:
            best = ordered_choice(scores, index.top_blocks)
        else:
            best = scores.topk(index.top_blocks, dim=-1, sorted=False).indices
        chosen[first : first + count].copy_(best)
    return chosen
