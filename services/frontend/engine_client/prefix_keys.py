"""Prefix keys of prompts, as engines compute them; docs/protocol.md defines them."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from services.frontend.engine_client.messages import PlacedImage

PREFIX_KEY_VERSION = 2
"""Version of the definition in docs/protocol.md; keys of other versions never match."""
_KEY_BYTES = 32
_ROOT = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.root")
_BLOCK = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.block")
COMPACT_KEY_BYTES = 8
"""Bytes of a reported key."""
_IMAGE = struct.Struct("<II32s")
"""An image in a block's data: where its tokens start in the block, their number, its digest."""


def compact_keys(
    salt: str,
    token_ids: bytes,
    block_size: int,
    *,
    max_blocks: int,
    images: Sequence[PlacedImage] = (),
    adapter_digest: bytes = b"",
    weights_salt: bytes = b"",
) -> list[int]:
    """Returns the keys of a prompt's full blocks as integers, in the form that engines report.

    Args:
        salt: the request's cache salt.
        token_ids: the prompt, packed as uint32.
        block_size: tokens of a block.
        max_blocks: most blocks that get a key.
        images: images in the prompt, in the order of their tokens.
        adapter_digest: of the request's adapter; empty for none.
        weights_salt: the engine's; empty until its weights change.
    """
    stride = 4 * block_size
    num_blocks = min(len(token_ids) // stride, max_blocks)
    data = salt.encode()
    digest = _ROOT.copy()
    digest.update(len(data).to_bytes(4, "little") + data + adapter_digest + weights_salt)
    key = digest.digest()
    begun: dict[int, bytes] = {}
    for image in images:
        block, place = divmod(image.offset, block_size)
        described = _IMAGE.pack(place, image.num_tokens, image.digest)
        begun[block] = begun.get(block, b"") + described
    keys = []
    for block in range(num_blocks):
        start = block * stride
        digest = _BLOCK.copy()
        digest.update(key + token_ids[start : start + stride] + begun.get(block, b""))
        key = digest.digest()
        keys.append(int.from_bytes(key[:COMPACT_KEY_BYTES], "little"))
    return keys


def read_keys(data: bytes) -> list[int]:
    """Unpacks reported keys."""
    keys: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return keys
