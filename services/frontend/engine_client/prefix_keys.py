"""The keys of a prompt's blocks, as the engine computes them; docs/protocol.md defines them."""

import hashlib

import numpy as np

PREFIX_KEY_VERSION = 2
"""Which definition of docs/protocol.md the keys follow; other engines' keys would never match."""
_KEY_BYTES = 32
_ROOT = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.root")
_BLOCK = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.block")
COMPACT_KEY_BYTES = 8
"""Bytes of a key that engines report."""


def compact_keys(salt: str, token_ids: bytes, block_size: int, *, max_blocks: int) -> list[int]:
    """Returns the keys of a prompt's full blocks in the form that engines report, as integers.

    Args:
        salt: the request's cache salt.
        token_ids: the prompt, packed; a rest that fills no block has no key.
        block_size: tokens in a block.
        max_blocks: blocks, from the first one on, after which no more keys are computed.
    """
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
    """Unpacks the keys that an engine reports."""
    keys: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return keys
