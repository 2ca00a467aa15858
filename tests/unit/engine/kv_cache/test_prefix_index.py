"""Keys of blocks, and the index over them."""

from hypothesis import given
from hypothesis import strategies as st

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


@given(st.lists(st.integers(0, 127), min_size=2, max_size=2), st.text(max_size=40))
def test_no_salt_spells_a_key_and_the_tokens_after_it(tokens, key):
    """Tokens can be chosen until a key is valid UTF-8, which a salt can then hold."""
    salt = key + "".join(chr(token) + "\0\0\0" for token in tokens)
    length = len(salt.encode()).to_bytes(4, "little")
    for parent in (key.encode(), length + key.encode()):
        assert chain_keys(parent, tokens, 2) != [root_key(salt)]


def test_keys_are_too_long_for_a_search_for_two_that_are_equal():
    assert len(root_key("")) == 32
    assert len(chain_keys(root_key(""), [1, 2], 2)[0]) == 32


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
