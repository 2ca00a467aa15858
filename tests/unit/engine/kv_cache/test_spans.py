"""Groups whose blocks hold several times the tokens of others."""

import random

import pytest

from services.engine.kv_cache.cache import NO_PREFIX, KVCache
from services.engine.kv_cache.cache_groups import CacheGroups, LayerGroup, group_layers
from tests.support.requests import make_request
from tests.unit.engine.kv_cache.test_windows import BLOCK_SIZE, grow, start

WINDOWS, SPANS = (None, 6), (4, 1)
SIZES = {"block_size": BLOCK_SIZE, "max_query_tokens": BLOCK_SIZE}


def make_cache(num_blocks=25):
    groups = CacheGroups(**SIZES, windows=WINDOWS, spans=SPANS)
    return KVCache(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True, groups=groups
    )


def test_entries_of_a_span_name_the_same_block():
    cache = make_cache()
    request, _ = start(cache, range(40))
    spanning = request.block_ids[::2]
    assert spanning == [spanning[0]] * 4 + [spanning[4]] * 4 + [spanning[8]] * 2
    assert len(set(spanning)) == 3
    # The window of the last step: see test_windows.
    assert cache.num_free_blocks == 24 - 3 - 3
    cache.free(request)
    assert cache.num_free_blocks == 24


def test_prefixes_have_whole_blocks_of_all_groups():
    cache = make_cache()
    first, found = start(cache, range(40))
    assert found == 0
    second, found = start(cache, [*range(36), 90, 91])
    assert found == 32
    assert second.block_ids[:16:2] == first.block_ids[:16:2]
    assert second.block_ids[16] != first.block_ids[16]
    for request in (first, second):
        cache.free(request)
    assert cache.num_free_blocks == 24
    assert start(cache, [*range(30), 90])[1] == 16 or cache.num_cached_blocks


def test_a_prefix_ends_where_the_window_before_it_is_known():
    cache = make_cache(num_blocks=40)
    first, _ = start(cache, range(36))
    cache.free(first)
    # Takes blocks of the window before token 32, reused first; 16 tokens are too few then, too.
    taken = cache._pool.take(cache.num_free_blocks - 4)
    cache._overwrite(taken)
    assert cache.match_prefix(make_request(range(36))).num_tokens in (0, 16, 32)


def test_too_few_blocks_add_none():
    cache = make_cache(num_blocks=5)
    request = make_request(range(40))
    assert len(cache.allocate(request, 12)) == 6
    assert cache.num_free_blocks == 0
    assert cache.allocate(request, 16) is None
    assert len(request.block_ids) == 6


def test_room_for_a_request_is_room_for_its_most_blocks_of_each_group():
    groups = CacheGroups(**SIZES, windows=WINDOWS, spans=SPANS)
    cache = make_cache(num_blocks=9)
    longest = groups.num_tokens(8, limit=400)
    assert longest == 64
    assert cache.fits(NO_PREFIX, longest)
    assert not cache.fits(NO_PREFIX, longest + 1)
    grow(cache, make_request(range(longest)), longest)


@pytest.mark.parametrize("seed", range(20))
def test_requests_in_any_order_leave_no_block_behind(seed):
    draws = random.Random(seed)
    cache = make_cache(num_blocks=40)
    running = []
    for _ in range(60):
        tokens = [*range(draws.randrange(40)), *draws.choices(range(50, 60), k=9)]
        request = make_request(tokens)
        prefix = cache.match_prefix(request)
        assert prefix.num_tokens % (BLOCK_SIZE * 4) == 0
        if cache.fits(prefix, len(tokens)):
            running.append(start(cache, tokens)[0])
        while running and (draws.random() < 0.4 or len(running) > 3):
            cache.free(running.pop(draws.randrange(len(running))))
    for request in running:
        cache.free(request)
    assert cache.num_free_blocks == 39


def test_a_group_has_the_least_span_of_its_layers():
    windows, spans = (None, 8, None, 8, None), (4, 1, 4, 1)
    groups = group_layers(windows, max_model_len=100, spans=spans)
    assert groups == (
        LayerGroup(layers=(0, 2), window=None, span=4),
        LayerGroup(layers=(4,), window=None),
        LayerGroup(layers=(1, 3), window=8),
    )
    assert group_layers(windows, max_model_len=8, spans=spans) == (
        LayerGroup(layers=(0, 1, 2, 3, 4), window=None),
    )
