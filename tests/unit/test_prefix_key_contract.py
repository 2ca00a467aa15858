"""Engine and frontend compute the same keys, which docs/protocol.md defines by example too."""

import re
from itertools import product
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv_cache.prefix_index import chain_keys, root_key
from services.engine.rpc.session import PREFIX_KEY_BYTES
from services.frontend.engine_client.messages import pack_uint32
from services.frontend.engine_client.prefix_keys import COMPACT_KEY_BYTES, compact_keys, read_keys

PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def reported(salt: str, token_ids: list[int], block_size: int) -> bytes:
    """Returns the keys that an engine reports for a prompt's blocks."""
    keys = chain_keys(root_key(salt), token_ids, block_size)
    return b"".join(key[:PREFIX_KEY_BYTES] for key in keys)


def test_both_sides_cut_keys_alike():
    assert PREFIX_KEY_BYTES == COMPACT_KEY_BYTES


@given(st.text(max_size=20), st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(1, 33))
def test_a_frontend_expects_what_the_engine_reports(salt, token_ids, block_size):
    expected = compact_keys(salt, pack_uint32(token_ids), block_size, max_blocks=1000)
    assert read_keys(reported(salt, token_ids, block_size)) == expected


def test_adapters_and_weights_are_part_of_the_root():
    tokens = [1, 2, 3, 4]
    seen = set()
    for adapter, weights in product((b"", b"a" * 32), (b"", b"w" * 16)):
        expected = compact_keys(
            "s", pack_uint32(tokens), 2, max_blocks=9, adapter_digest=adapter, weights_salt=weights
        )
        keys = chain_keys(root_key("s", adapter, weights), tokens, 2)
        assert read_keys(b"".join(key[:PREFIX_KEY_BYTES] for key in keys)) == expected
        seen.update(expected)
    assert len(seen) == 8


def test_the_keys_are_those_of_the_document():
    row = r"^\| `(.*)` \| `([\d, ]*)` \| `([0-9a-f ]*)` \|$"
    examples = re.findall(row, PROTOCOL.read_text(), re.MULTILINE)
    assert len(examples) == 3
    for salt, tokens, keys in examples:
        token_ids = [int(token) for token in tokens.split(",")]
        assert reported(salt.strip('"'), token_ids, 2) == bytes.fromhex(keys.replace(" ", ""))
