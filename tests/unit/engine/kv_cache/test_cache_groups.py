import pytest

from services.engine.kv_cache.cache_groups import CacheGroups, LayerGroup, group_layers


def layers_of(windows, max_model_len=1000):
    groups = group_layers(windows, max_model_len=max_model_len)
    return [(group.window, list(group.layers)) for group in groups]


def test_layers_of_one_kind_are_one_group():
    assert layers_of([None] * 3) == [(None, [0, 1, 2])]
    assert layers_of([8] * 3) == [(8, [0, 1, 2])]


def test_layers_in_turns_are_two_groups_of_half_of_them():
    assert layers_of([8, None, 8, None]) == [(None, [1, 3]), (8, [0, 2])]


def test_a_kind_of_many_layers_is_divided():
    assert layers_of([8, 8, 8, 8, 8, None] * 2) == [
        (None, [5, 11]),
        (8, [0, 1]),
        (8, [2, 3]),
        (8, [4, 6]),
        (8, [7, 8]),
        (8, [9, 10]),
    ]


def test_every_layer_is_in_one_group_and_groups_are_few():
    for first in range(1, 40):
        groups = group_layers([None] * first + [16] * (40 - first), max_model_len=1000)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(40))
        assert len(groups) <= 9


def test_a_window_as_long_as_any_sequence_is_none():
    assert layers_of([8, None], max_model_len=8) == [(None, [0, 1])]
    assert layers_of([7, None], max_model_len=8) == [(None, [1]), (7, [0])]


def test_windows_of_several_sizes_are_several_kinds():
    assert group_layers([4, None, 9], max_model_len=100) == (
        LayerGroup(layers=(1,), window=None),
        LayerGroup(layers=(0,), window=4),
        LayerGroup(layers=(2,), window=9),
    )


def test_groups_have_the_size_that_leaves_least_unused():
    groups = group_layers([None] * 41 + [8] * 43, max_model_len=100)
    assert [len(group.layers) for group in groups] == [41, 43]
    groups = group_layers([None] * 4 + [8] * 22, max_model_len=100)
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 4, 2]


def test_the_first_block_is_that_of_the_first_key_in_the_window():
    groups = CacheGroups(block_size=4, max_query_tokens=3, windows=(None, 6))
    assert [groups.first_block(1, position) for position in (0, 5, 8, 9, 12, 13)] == [
        *(0, 0, 0),
        *(1, 1, 2),
    ]
    assert groups.first_block(0, 1000) == 0


def test_chunks_are_a_kind_of_their_own():
    assert layers_of([-8, None, 8, -8]) == [(None, [1]), (-8, [0]), (-8, [3]), (8, [2])]
    assert layers_of([-8, None], max_model_len=8) == [(None, [0, 1])]


def test_the_first_block_of_a_chunk_has_its_first_position():
    groups = CacheGroups(block_size=4, max_query_tokens=3, windows=(-6,))
    first = [groups.first_block(0, position) for position in (0, 5, 6, 11, 12, 17, 18)]
    assert first == [0, 0, 1, 1, 3, 3, 4]


@pytest.mark.parametrize("window", [1, 4, 5, 6, 17, -1, -4, -6, -17])
@pytest.mark.parametrize("max_query_tokens", [1, 3, 4, 20])
def test_no_step_sees_more_blocks_than_the_most(window, max_query_tokens):
    groups = CacheGroups(block_size=4, max_query_tokens=max_query_tokens, windows=(window,))
    for start in range(100):
        end = start + max_query_tokens
        held = -(-end // 4) - groups.first_block(0, start)
        assert held <= groups.most_blocks(0, end)


def test_a_pool_holds_longer_sequences_where_windows_give_blocks_back():
    sizes = {"block_size": 4, "max_query_tokens": 4}
    assert CacheGroups(**sizes).num_tokens(10, limit=1000) == 40
    assert CacheGroups(**sizes).num_tokens(10, limit=21) == 24
    assert CacheGroups(**sizes, windows=(None, None)).num_tokens(10, limit=1000) == 20
    # A window of 4 and a step of 4 tokens take 3 blocks at most.
    assert CacheGroups(**sizes, windows=(None, 4)).num_tokens(10, limit=1000) == 28
    assert CacheGroups(**sizes, windows=(4,)).num_tokens(3, limit=1000) == 1000
    assert CacheGroups(**sizes, windows=(4,)).num_tokens(2, limit=1000) == 8
