from dataclasses import replace

import pytest
import torch

from models.forward_context import PromptChunk
from models.kernels.attention.configurations import few_query_tiles
from models.kernels.attention.decode.few_queries import has_few, most_few_queries
from tests.support.attention_case import Heads, make_case

CPU = torch.device("cpu")


def case_of(num_heads=8, num_kv_heads=2, head_dim=64, *, dtype=torch.bfloat16, is_fp8=True):
    heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return make_case([2], [5], heads, dtype=dtype, has_fp8_cache=is_fp8)


def most_of(case):
    return most_few_queries(case.q, case.cache, case.metadata.workspace)


@pytest.mark.parametrize(("group", "tokens"), [(1, 64), (4, 32), (5, 25), (8, 16), (64, 2)])
def test_the_rows_of_a_request_are_few(group, tokens):
    assert most_of(case_of(num_heads=group, num_kv_heads=1)) == tokens


def test_other_caches_and_heads_have_other_kernels():
    assert most_of(case_of(is_fp8=False)) == 0
    assert most_of(case_of(dtype=torch.float32)) == 0
    assert most_of(case_of(head_dim=32)) == 0
    assert most_of(case_of(head_dim=256)) == 0
    assert most_of(case_of(num_heads=65, num_kv_heads=1)) == 0
    case = case_of()
    assert most_few_queries(case.q, case.cache, None) == 0


def test_few_queries_are_launched_for_where_the_host_knows_of_them():
    metadata = case_of().metadata
    chunks = tuple(
        PromptChunk(request=i, first_token=0, num_queries=num_queries, num_keys=900)
        for i, num_queries in enumerate((65, 64, 300))
    )
    assert has_few(metadata, 2)
    assert not has_few(metadata, 1)
    assert has_few(replace(metadata, max_seqlen_q=300, chunks=chunks), 64)
    assert not has_few(replace(metadata, max_seqlen_q=300, chunks=chunks[::2]), 64)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9, 16, 33, 64])
def test_warm_up_builds_all_tiles(group):
    most = most_of(case_of(num_heads=group, num_kv_heads=1))
    built = {
        few_query_tiles(min(tokens, most) * group, group=group, num_requests=requests, device=CPU)
        for tokens, requests in ((128, 1), (2, 2))
    }
    for tokens in range(2, most + 1):
        for requests in (1, 4, 5, 256):
            tiles = few_query_tiles(tokens * group, group=group, num_requests=requests, device=CPU)
            assert tiles in built
            assert tiles.rows >= group
