"""States of requests at some of their positions, kept so that others can start from them.

A state is what layers without keys and values know of all tokens before a position. The live one
of a request changes with every step, so others can share only a copy: a snapshot. Its blocks come
from the pool of all blocks, are found by the key of the tokens before it, and are reused by the
same clock.
"""

from dataclasses import dataclass, field
from math import lcm

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.request import Snapshot

CHUNK = 64
"""Snapshots are made at multiples of as many tokens: kernels compute prompts in such chunks."""
LONG_PROMPT = 4096
"""Tokens of a prompt between two snapshots, besides the one at its end."""


def snapshot_interval(block_size: int) -> int:
    """Returns the number of tokens whose multiples have both a snapshot and whole blocks."""
    return lcm(CHUNK, block_size)


@dataclass(frozen=True, slots=True)
class StateCopies:
    """Blocks whose content a step copies before it computes: first saved, then restored states.

    Each list has pairs of blocks, from and to.
    """

    saved: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.saved or self.restored)


class SnapshotIndex:
    """Finds snapshots by the keys of the tokens before them."""

    def __init__(self, pool: BlockPool) -> None:
        """Starts empty.

        Args:
            pool: has the blocks.
        """
        self._pool = pool
        self._by_key: dict[bytes, Snapshot] = {}
        self._by_block: dict[int, Snapshot] = {}
        self._pinned: list[Snapshot] = []

    def __len__(self) -> int:
        """Snapshots that can be found."""
        return len(self._by_key)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of known snapshots that no step reads."""
        held = {each for each in self._pinned if each.key is not None}
        return len(self._by_block) - sum(len(each.block_ids) for each in held)

    def find(self, key: bytes) -> Snapshot | None:
        """Returns the snapshot after the tokens of a key, if there is one."""
        return self._by_key.get(key)

    def has(self, key: bytes) -> bool:
        """Whether there is a snapshot after the tokens of a key."""
        return key in self._by_key

    def with_block(self, block_id: int) -> Snapshot | None:
        """Returns the known snapshot that has a block, if any."""
        return self._by_block.get(block_id)

    def is_free(self, snapshot: Snapshot) -> bool:
        """Whether it is held by no step, so that its blocks count as free."""
        return self._pool.is_free(snapshot.block_ids[0])

    def add(self, key: bytes, snapshot: Snapshot) -> None:
        """Makes a snapshot known and gives up its blocks; a second one with the key is dropped."""
        is_new = key not in self._by_key
        if is_new:
            snapshot.key = key
            self._by_key[key] = snapshot
            self._by_block |= dict.fromkeys(snapshot.block_ids, snapshot)
        self._release(snapshot, keep_long=is_new)

    def drop(self, snapshot: Snapshot) -> None:
        """Gives up the blocks of a snapshot that cannot be found."""
        self._release(snapshot, keep_long=False)

    def pin(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot until `unpin_all`, as a step reads it."""
        for block_id in snapshot.block_ids:
            self._pool.share(block_id)
        self._pinned.append(snapshot)

    def unpin_all(self) -> None:
        """Gives up all pins; called when the step that reads them was sent."""
        for snapshot in self._pinned:
            self._release(snapshot, keep_long=True)
        self._pinned.clear()

    def take(self, snapshot: Snapshot) -> list[int]:
        """Turns a free snapshot into blocks that the caller holds; it can no longer be found."""
        block_ids = snapshot.block_ids
        for block_id in block_ids:
            self._pool.share(block_id)
        self._forget(snapshot)
        return block_ids

    def forget(self, key: bytes) -> None:
        """Makes the snapshot of a key unknown, if there is one."""
        if (snapshot := self._by_key.get(key)) is not None:
            self._forget(snapshot)
            self._reuse_first(snapshot)

    def forget_block(self, block_id: int) -> None:
        """Makes a snapshot unknown whose block was taken from the pool for other content."""
        if (snapshot := self._by_block.get(block_id)) is not None:
            self._forget(snapshot)
            self._reuse_first(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        assert snapshot.key is not None, "only a snapshot that is known is forgotten"
        del self._by_key[snapshot.key]
        snapshot.key = None
        for block_id in snapshot.block_ids:
            del self._by_block[block_id]

    def _reuse_first(self, snapshot: Snapshot) -> None:
        """Makes the free blocks of an unknown snapshot the next to be reused."""
        for block_id in snapshot.block_ids:
            self._pool.reuse_first(block_id)

    def _release(self, snapshot: Snapshot, *, keep_long: bool) -> None:
        keep_long = keep_long and snapshot.key is not None
        for block_id in reversed(snapshot.block_ids):
            self._pool.release(block_id, keep_long=keep_long)
