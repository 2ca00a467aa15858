"""Keys of blocks, and the index over them."""

from services.engine.kv_cache.prefix_index import PrefixIndex, chain_keys, root_key


def test_keys_depend_on_all_tokens_before():
    first = chain_keys(root_key(""), [1, 2, 3, 4, 5, 6], 2)
    other = chain_keys(root_key(""), [9, 2, 3, 4, 5, 6], 2)
    assert set(first).isdisjoint(other)


def test_keys_of_equal_prefixes_are_equal():
    longer = chain_keys(root_key(""), [1, 2, 3, 4, 5], 2)
    assert chain_keys(root_key(""), [1, 2, 3], 2) == longer[:1]


def test_keys_can_be_extended_piece_by_piece():
    whole = chain_keys(root_key("a"), list(range(12)), 4)
    pieces = chain_keys(root_key("a"), list(range(4)), 4)
    pieces += chain_keys(pieces[-1], list(range(4, 12)), 4)
    assert pieces == whole


def test_different_salts_share_no_key():
    tokens = list(range(8))
    assert set(chain_keys(root_key(""), tokens, 4)).isdisjoint(
        chain_keys(root_key("tenant"), tokens, 4)
    )


def test_a_hole_ends_the_match():
    index = PrefixIndex()
    index.add(b"a", 1)
    index.add(b"c", 3)
    assert index.find([b"a", b"b", b"c"]) == [1]


def test_the_first_of_two_blocks_with_equal_content_is_found():
    index = PrefixIndex()
    index.add(b"a", 1)
    index.add(b"a", 2)
    assert index.find([b"a"]) == [1]
    assert 2 not in index
    assert not index.forget(2)
    assert index.forget(1)
    assert len(index) == 0
