"""Attention to chosen blocks against one query after the other, and what steps it holds for."""

import pytest
import torch

from tests.support.attention_case import Heads
from tests.support.block_sparse_case import make_block_sparse_case

HEADS = Heads(num_heads=6, num_kv_heads=3, head_dim=8)
BATCHES = (([1] * 3, [5, 1, 90]), ([1, 7, 20], [5, 7, 90]), ([70], [70]))


def attended(case, request, position, query):
    """Returns a query's attention to the best blocks of each kv head, from the cache."""
    plain, table = case.plain, case.plain.metadata.block_tables[request]
    cached = [x[table.long()].flatten(0, 1) for x in plain.cache.tensors().values()]
    keys, values, index_keys = (x[: position + 1] for x in cached)
    heads = []
    for head in range(HEADS.num_heads):
        kv_head = head // (HEADS.num_heads // HEADS.num_kv_heads)
        scores = index_keys @ case.index_q[query, kv_head]
        blocks = scores.split(case.block_size)
        best = [float(each.max()) for each in blocks]
        for local in range(case.local_blocks):
            best[max(0, len(blocks) - 1 - local)] = torch.inf
        order = sorted(range(len(blocks)), key=lambda number: -best[number])
        seen = torch.zeros(len(blocks), dtype=torch.bool)
        seen[order[: case.top_blocks]] = True
        seen = seen.repeat_interleave(case.block_size)[: position + 1]
        weights = keys[seen, kv_head] @ plain.q[query, head] * HEADS.head_dim**-0.5
        heads.append(weights.softmax(0) @ values[seen, kv_head])
    return torch.stack(heads)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("block_size", "top", "local"), [(24, 2, 1), (7, 3, 0), (5, 4, 3)])
def test_every_query_attends_to_its_best_blocks(batch, block_size, top, local):
    case = make_block_sparse_case(
        *batch, HEADS, block_size=block_size, top_blocks=top, local_blocks=local
    )
    output, query = case.run(), 0
    for request, (num_queries, length) in enumerate(zip(*batch, strict=True)):
        for position in range(length - num_queries, length):
            expected = attended(case, request, position, query)
            torch.testing.assert_close(output[query], expected, rtol=1e-4, atol=1e-5)
            query += 1


def test_a_step_stores_the_keys_of_the_index_and_no_others():
    case = make_block_sparse_case([1, 3], [9, 20], HEADS)
    before, slots = case.plain.cache.index_keys.clone(), case.plain.metadata.slot_mapping
    case.run()
    stored = case.plain.cache.index_keys.flatten(0, 1)
    assert torch.equal(stored[slots], case.index_k)
    changed = (stored != before.flatten(0, 1)).any(1).nonzero().flatten()
    assert set(changed.tolist()) == set(slots.tolist())
