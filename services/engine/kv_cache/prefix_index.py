"""Finds blocks by the tokens they hold and all tokens before them."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from struct import pack
from types import MappingProxyType

from services.engine.kv_cache.block_events import BlockContent
from services.engine.kv_cache.prefix_journal import BlockJournal
from services.engine.prompt_image import PromptImage

PREFIX_KEY_VERSION = 2
"""Version of the keys that docs/protocol.md defines; frontends compute the same ones.

Version 1 hashed root and blocks alike, so a salt could spell a key and the tokens after it.
"""
_KEY_BYTES = 32
"""Callers choose salts and tokens, so a collision must be out of reach: it takes 2^128 hashes; keys
of 16 bytes would take 2^64."""
_ROOT = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.root")
_BLOCK = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"octavo2.block")


def root_key(salt: str, adapter_digest: bytes = b"", weights_salt: bytes = b"") -> bytes:
    """Returns the key before the first block.

    Different salts never share a block, nor do different adapters or weights; no digest means no
    adapter. The salt of weights is random, so that it is no adapter's digest.
    """
    data = salt.encode()
    digest = _ROOT.copy()
    # The length keeps the salt apart from the adapter.
    digest.update(len(data).to_bytes(4, "little") + data + adapter_digest + weights_salt)
    return digest.digest()


def image_marks(images: Iterable[PromptImage], block_size: int) -> dict[int, bytes]:
    """Returns what keys of blocks hash besides their tokens, by number of the block.

    The block in which an image begins hashes its offset in the block, its number of tokens and its
    digest, so images with the same tokens differ.
    """
    marks: dict[int, bytes] = {}
    for each in images:
        block, offset = divmod(each.offset, block_size)
        numbers = (offset.to_bytes(4, "little"), each.num_tokens.to_bytes(4, "little"))
        marks[block] = b"".join((marks.get(block, b""), *numbers, each.image.digest))
    return marks


def chain_keys(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    marks: Mapping[int, bytes] = MappingProxyType({}),
) -> list[bytes]:
    """Returns the keys of the full blocks that follow `parent`.

    A key hashes the block's tokens and the key before it, hence the whole prefix. The hash is
    cryptographic because callers share blocks with equal keys unchecked.

    Args:
        parent: key of the block before the first one, or the root key.
        token_ids: tokens after that block; an unfilled last block is ignored.
        block_size: tokens in a block.
        marks: what a block hashes besides its tokens, by its number among these.
    """
    data = pack(f"<{len(token_ids)}i", *token_ids)
    stride = 4 * block_size
    keys: list[bytes] = []
    for start in range(0, len(data) - stride + 1, stride):
        digest = _BLOCK.copy()  # half the time of making one with its person
        digest.update(parent + data[start : start + stride])
        if marks:
            digest.update(marks.get(start // stride, b""))
        parent = digest.digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """Maps each key to one block with its content."""

    def __init__(self, journal: BlockJournal | None = None) -> None:
        """Starts empty; `journal` replaces one of its own, where others read it."""
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}
        self.journal = journal or BlockJournal()
        """Notes its changes."""

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_by_key)

    def __contains__(self, block_id: int) -> bool:
        """Whether the block can be found."""
        return block_id in self._key_by_block

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the first keys, up to the first unknown one."""
        blocks: list[int] = []
        for key in keys:
            block_id = self._block_by_key.get(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def has(self, key: bytes) -> bool:
        """Whether a block has a key's content."""
        return key in self._block_by_key

    def key_of(self, block_id: int) -> bytes | None:
        """Returns the key of a block's content, if it can be found."""
        return self._key_by_block.get(block_id)

    def block_of(self, key: bytes) -> int | None:
        """Returns the block with a key's content, if any."""
        return self._block_by_key.get(key)

    def add(self, key: bytes, block_id: int, content: BlockContent | None = None) -> None:
        """Adds a block unless another with the same content is present.

        Args:
            key: of its content.
            block_id: the block.
            content: for subscribers; None hides the block from them.
        """
        if key not in self._block_by_key:
            self._block_by_key[key] = block_id
            self._key_by_block[block_id] = key
            self.journal.stored(key, content)

    def forget(self, block_id: int) -> bool:
        """Removes a block before it is overwritten; returns whether it was known."""
        key = self._key_by_block.pop(block_id, None)
        if key is None:
            return False
        del self._block_by_key[key]
        self.journal.removed(key)
        return True

    def forget_all(self, block_ids: Iterable[int]) -> int:
        """Removes blocks before they are overwritten; returns how many were known."""
        known = [block_id for block_id in block_ids if block_id in self._key_by_block]
        for block_id in known:
            self.forget(block_id)
        return len(known)

    def forget_key(self, key: bytes) -> int | None:
        """Removes a key; returns its block, if it had one."""
        block_id = self._block_by_key.pop(key, None)
        if block_id is not None:
            del self._key_by_block[block_id]
            self.journal.removed(key)
        return block_id

    def keys(self) -> Collection[bytes]:
        """Returns the keys of all blocks, oldest first."""
        return self._block_by_key.keys()
