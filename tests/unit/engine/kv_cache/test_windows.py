"""Groups of layers that free the blocks before their window."""

import pytest

from services.engine.kv_cache.cache import NO_PREFIX, KVCache
from services.engine.kv_cache.cache_groups import CacheGroups
from tests.support.requests import make_request

BLOCK_SIZE = 4
NUM_BLOCKS = 25


def make_cache(*windows, num_blocks=NUM_BLOCKS):
    groups = CacheGroups(block_size=BLOCK_SIZE, max_query_tokens=BLOCK_SIZE, windows=windows)
    return KVCache(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True, groups=groups
    )


def grow(cache, request, num_tokens):
    """Computes a request's tokens a block at a time."""
    while request.num_computed_tokens < num_tokens:
        end = min(request.num_computed_tokens + BLOCK_SIZE, num_tokens)
        cache.cache_full_blocks(request)
        assert cache.allocate(request, end) is not None
        request.num_computed_tokens = end
    cache.cache_full_blocks(request)


def start(cache, tokens):
    """Lets a request run that computes all of its tokens; returns how many it found computed."""
    request = make_request(tokens)
    prefix = cache.match_prefix(request)
    cache.take_prefix(request, prefix, len(request.token_ids))
    found = request.num_indexed_blocks * BLOCK_SIZE
    request.num_computed_tokens = found
    grow(cache, request, len(request.token_ids))
    return request, found


def test_a_group_gives_back_what_its_window_left():
    cache = make_cache(None, 6)
    request, _ = start(cache, range(40))
    full, windowed = request.block_ids[::2], request.block_ids[1::2]
    assert 0 not in full
    # The step from token 36 saw tokens from 31 on, in block 7.
    assert windowed[:7] == [0] * 7
    assert 0 not in windowed[7:]
    assert cache.num_free_blocks == NUM_BLOCKS - 1 - 10 - 3


def test_blocks_given_back_serve_every_group_and_come_back_whole():
    cache = make_cache(None, 6, num_blocks=17)
    first, _ = start(cache, range(40))
    assert cache.num_free_blocks == 16 - 10 - 3
    cache.free(first)
    assert first.block_ids == []
    assert cache.num_free_blocks == 16
    second, found = start(cache, range(100, 144))
    assert found == 0
    cache.free(second)
    assert cache.num_free_blocks == 16


def test_a_prefix_brings_the_blocks_that_the_next_token_sees():
    cache = make_cache(None, 6)
    first, _ = start(cache, range(21))
    second = make_request([*range(20), 77, 78])
    prefix = cache.match_prefix(second).block_ids
    assert prefix[::2] == first.block_ids[: 2 * 5 : 2]
    # The token at 20 sees tokens from 15 on, in block 3.
    assert prefix[1::2] == [0, 0, 0, *first.block_ids[7:11:2]]


def test_a_prefix_ends_where_a_window_has_a_hole():
    cache = make_cache(None, 6)
    first, _ = start(cache, range(41))
    cache.free(first)
    assert start(cache, [*range(40), 7])[1] == 40
    # Sixteen blocks are not enough for 22: those of the first tokens were reused first.
    cache = make_cache(None, 6, num_blocks=17)
    start(cache, range(41))
    assert cache.match_prefix(make_request([*range(24), 99])).block_ids == []
    longer = cache.match_prefix(make_request([*range(32), 99])).block_ids
    assert len(longer) == 2 * 8
    assert longer[1::2][:6] == [0] * 6


def test_what_a_window_left_can_be_found_until_it_is_reused():
    cache = make_cache(4)
    first, _ = start(cache, range(33))
    assert first.block_ids[:7] == [0] * 7
    assert cache.num_cached_blocks == 7
    # Its own window begins with a block that the first request gave back.
    shorter = make_request([*range(16), 50])
    prefix = cache.match_prefix(shorter).block_ids
    assert len(prefix) == 4
    assert prefix[:3] == [0] * 3
    assert prefix[3] != 0
    other, _ = start(make_cache(4), range(200, 260))
    assert other.block_ids.count(0) == len(other.block_ids) - 2


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,), (None, 6, 9)])
def test_room_for_a_request_is_room_for_its_most_blocks_of_each_group(windows):
    cache = make_cache(*windows, num_blocks=13)
    limit = CacheGroups(block_size=BLOCK_SIZE, max_query_tokens=BLOCK_SIZE, windows=windows)
    longest = limit.num_tokens(12, limit=400)
    assert cache.fits(NO_PREFIX, longest)
    assert longest == 400 or not cache.fits(NO_PREFIX, longest + 1)
    request = make_request(range(longest))
    grow(cache, request, longest)


def test_too_few_blocks_for_all_groups_add_none():
    cache = make_cache(None, 6, num_blocks=6)
    request = make_request(range(20))
    assert len(cache.allocate(request, 8)) == 4
    assert cache.allocate(request, 12) is None
    assert cache.num_free_blocks == 1
    assert len(request.block_ids) == 4
