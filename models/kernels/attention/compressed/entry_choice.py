"""The index of compressed entries: chooses which ones each query attends to."""

import torch
import triton
import triton.language as tl

from models.kernels.attention.compressed.row_places import row_form, row_places, row_tensors
from models.kernels.attention.latent.index_choice import MOST_SCORES
from models.kernels.attention.request_search import request_of
from models.operands.index_queries import IndexQueries
from models.operands.row_pages import RowPages

_ENTRIES = 64
_METADATA = [
    "query_start_ptr", "positions_ptr", "table_stride", "num_requests", "first_token", "num_scores",
]  # fmt: skip


@triton.jit(do_not_specialize=_METADATA)
def _score_entries_kernel(
    q_ptr, weights_ptr, cache, scores_ptr, query_start_ptr, positions_ptr, table_stride,
    num_requests, first_token, num_scores,
    form: tl.constexpr, PLACE: tl.constexpr, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores some entries for one query; unseen ones get minus infinity."""
    row = tl.program_id(1)
    token = first_token + row
    first = tl.program_id(0) * ENTRIES
    numbers = first + tl.arange(0, ENTRIES)
    num_seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // form.rate
    scores = tl.full([ENTRIES], float("-inf"), tl.float32)
    if first < num_seen:
        request = request_of(token, query_start_ptr, num_requests)
        are_seen = numbers < num_seen
        heads = tl.arange(0, BLOCK_H)
        dims = tl.arange(0, BLOCK_D)
        is_head = heads < NUM_HEADS
        in_entry = (dims < SIZE)[None, :]
        at_heads = token.to(tl.int64) * NUM_HEADS + heads
        q = tl.load(
            q_ptr + at_heads[:, None] * SIZE + dims[None, :],
            mask=is_head[:, None] & in_entry,
            other=0.0,
        )
        weights = tl.load(weights_ptr + at_heads, mask=is_head, other=0.0)
        table_ptr = cache.tables + request.to(tl.int64) * table_stride
        at, _ = row_places(table_ptr, numbers, are_seen, form)
        at_keys = cache.rows + (at + PLACE)[:, None] + dims[None, :]
        keys = tl.load(at_keys, mask=are_seen[:, None] & in_entry, other=0.0)
        products = tl.dot(q, tl.trans(keys), input_precision="ieee")
        summed = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
        scores = tl.where(are_seen, summed, scores)
    at_scores = row.to(tl.int64) * num_scores + numbers
    tl.store(scores_ptr + at_scores, scores, mask=numbers < num_scores)


def choose_entries(
    index: IndexQueries,
    entries: RowPages,
    place: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    """Returns the numbers of the entries of the highest scores, [T, top_k] int64.

    A query that sees fewer also gets numbers that it does not see. None if no sequence can have
    more than top_k. The host reads nothing.

    entries: with this step's. place: of the index's key in a row.
    query_start_loc: [R + 1], where each request's query tokens start. positions: [T].
    """
    num_scores, num_tokens = entries.num_rows, len(positions)
    if num_scores <= index.top_k:
        return None
    _, num_heads, size = index.q.shape
    chosen = []
    run = max(1, MOST_SCORES // num_scores)
    for first in range(0, num_tokens, run):
        count = min(run, num_tokens - first)
        scores = torch.empty(count, num_scores, dtype=torch.float32, device=positions.device)
        _score_entries_kernel[(triton.cdiv(num_scores, _ENTRIES), count)](
            index.q, index.weights, row_tensors(entries), scores, query_start_loc, positions,
            entries.block_tables.stride(0), len(query_start_loc) - 1, first, num_scores,
            form=row_form(entries), PLACE=place, NUM_HEADS=num_heads, SIZE=size, ENTRIES=_ENTRIES,
            BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
            BLOCK_D=max(16, triton.next_power_of_2(size)), num_warps=4,
        )  # fmt: skip
        chosen.append(scores.topk(index.top_k, dim=-1, sorted=False).indices)
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)
