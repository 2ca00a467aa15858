"""Prefix keys of prompts, as engines compute them; docs/protocol.md defines them."""

import hashlib

import numpy as np

PREFIX_KEY_VERSION = 2
"""Version of the definition in docs/protocol.md; keys of other versions never match."""
_KEY_BYTES = 32
_ROOT = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.root")
_BLOCK = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.block")
COMPACT_KEY_BYTES = 8
"""Bytes of a reported key."""


def compact_keys(salt: str, token_ids: bytes, block_size: int, *, max_blocks: int) -> list[int]:
    """Returns the keys of a prompt's full blocks as integers, in the form that engines report."""
    stride = 4 * block_size
    num_blocks = min(len(token_ids) // stride, max_blocks)
    data = salt.encode()
    digest = _ROOT.copy()
    digest.update(len(data).to_bytes(4, "little") + data)
    key = digest.digest()
    keys = []
    for start in range(0, num_blocks * stride, stride):
        digest = _BLOCK.copy()
        digest.update(key + token_ids[start : start + stride])
        key = digest.digest()
        keys.append(int.from_bytes(key[:COMPACT_KEY_BYTES], "little"))
    return keys


def read_keys(data: bytes) -> list[int]:
    """Unpacks reported keys."""
    keys: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return keys
