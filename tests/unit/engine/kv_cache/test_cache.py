"""The KV cache: blocks for requests and shared prefixes."""

import pytest

from services.engine.kv_cache.cache import KVCache
from services.engine.request import Request
from tests.support.requests import make_request

BLOCK_SIZE = 4


@pytest.fixture
def cache() -> KVCache:
    return KVCache(num_blocks=9, block_size=BLOCK_SIZE, enable_prefix_caching=True)


def compute(cache: KVCache, request: Request) -> None:
    """Does what the scheduler does for a request that is computed at one go."""
    prefix = cache.match_prefix(request)
    cache.take_prefix(request, prefix, len(request.token_ids))
    assert cache.allocate(request, len(request.token_ids)) is not None
    request.num_computed_tokens = len(request.token_ids)
    cache.cache_full_blocks(request)


def test_blocks_are_added_only_where_the_tokens_reach(cache):
    request = make_request(10)
    assert len(cache.allocate(request, 5)) == 2
    assert cache.allocate(request, 8) == []
    assert len(cache.allocate(request, 9)) == 1
    assert cache.num_free_blocks == 5


def test_nothing_changes_when_too_few_blocks_are_free(cache):
    request = make_request(10)
    assert cache.allocate(request, 9 * BLOCK_SIZE) is None
    assert cache.num_free_blocks == 8
    assert request.block_ids == []


def test_requests_with_equal_prefixes_share_its_full_blocks(cache):
    first, second = make_request(range(10)), make_request([*range(9), 77])
    compute(cache, first)
    compute(cache, second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert cache.num_free_blocks == 4


def test_a_match_leaves_the_last_token_to_compute(cache):
    first, second = make_request(range(8)), make_request(range(8))
    compute(cache, first)
    assert cache.match_prefix(second).block_ids == first.block_ids[:1]


def test_requests_with_different_salts_share_nothing(cache):
    compute(cache, make_request(range(8), cache_salt="a"))
    assert cache.match_prefix(make_request(range(8), cache_salt="b")).block_ids == []


def test_blocks_with_a_pending_token_are_not_found(cache):
    first = make_request(range(7))
    cache.allocate(first, 8)
    first.num_pending_tokens = 1
    first.num_computed_tokens = 8
    cache.cache_full_blocks(first)
    assert len(cache.match_prefix(make_request([*range(7), 7, 8])).block_ids) == 1


def test_blocks_that_are_not_computed_yet_are_not_found(cache):
    first = make_request(range(12))
    cache.allocate(first, 12)
    first.num_computed_tokens = 7
    cache.cache_full_blocks(first)
    assert cache.match_prefix(make_request(range(12))).block_ids == first.block_ids[:1]


def test_blocks_given_back_stay_findable_until_they_are_reused(cache):
    first = make_request(range(13))
    compute(cache, first)
    held = list(first.block_ids)
    cache.free(first)
    assert cache.num_free_blocks == 8
    assert cache.num_cached_blocks == 3
    assert cache.match_prefix(make_request(range(13))).block_ids == held[:3]
    cache.allocate(make_request(1), 8 * BLOCK_SIZE)
    assert cache.num_cached_blocks == 0
    assert cache.match_prefix(make_request(range(13))).block_ids == []


def test_the_deepest_block_of_a_chain_is_reused_first(cache):
    first = make_request(range(13))
    compute(cache, first)
    held = list(first.block_ids)
    cache.free(first)
    cache.allocate(make_request(1), 6 * BLOCK_SIZE)  # the five others, and one of the chain
    assert cache.match_prefix(make_request(range(13))).block_ids == held[:2]


def test_free_blocks_of_a_prefix_count_as_needed(cache):
    first = make_request(range(17))
    compute(cache, first)
    cache.free(first)
    other = make_request(1)
    cache.allocate(other, 4 * BLOCK_SIZE)
    again = make_request(range(17))
    prefix = cache.match_prefix(again)
    assert len(prefix.block_ids) == 4
    assert cache.num_free_blocks == 4
    assert not cache.fits(prefix, 17)
    assert cache.fits(prefix, 16)


def test_without_prefix_caching_nothing_is_found():
    cache = KVCache(num_blocks=9, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    compute(cache, make_request(range(8)))
    assert cache.match_prefix(make_request(range(8))).block_ids == []
    assert cache.num_cached_blocks == 0
