"""States of requests at some of their positions, kept so that others can start from them.

A state is what layers without keys and values know of all tokens before a position. The live one
of a request changes with every step, so others can share only a copy: a snapshot. Its blocks come
from the pool of all blocks, are found by the key of the tokens before it, and are reused by the
same clock.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.request import BlockIds, Snapshot

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

    The n-th block of an array *to* gets the content of the n-th block of the array *from*.
    """

    saved_from: BlockIds = field(default_factory=lambda: array("i"))
    saved_to: BlockIds = field(default_factory=lambda: array("i"))
    restored_from: BlockIds = field(default_factory=lambda: array("i"))
    restored_to: BlockIds = field(default_factory=lambda: array("i"))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.saved_to or self.restored_to)


class SnapshotIndex:
    """Finds snapshots by the keys of the tokens before them.

    The blocks of a snapshot are a bundle of the pool: no cost here grows with their number.
    """

    def __init__(self, pool: BlockPool) -> None:
        """Starts empty.

        Args:
            pool: has the blocks.
        """
        self._pool = pool
        self._by_key: dict[bytes, Snapshot] = {}
        self._by_first_block: dict[int, Snapshot] = {}
        self._pinned: list[Snapshot] = []

    def __len__(self) -> int:
        """Snapshots that can be found."""
        return len(self._by_key)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of known snapshots that no step reads."""
        return sum(len(each.block_ids) for each in self._by_key.values() if not each.num_holders)

    def find(self, key: bytes) -> Snapshot | None:
        """Returns the snapshot after the tokens of a key, if there is one."""
        return self._by_key.get(key)

    def has(self, key: bytes) -> bool:
        """Whether there is a snapshot after the tokens of a key."""
        return key in self._by_key

    def with_block(self, block_id: int) -> Snapshot | None:
        """Returns the known snapshot whose first block this is, if any."""
        return self._by_first_block.get(block_id)

    def is_free(self, snapshot: Snapshot) -> bool:
        """Whether it is held by no step, so that its blocks count as free."""
        return not snapshot.num_holders

    def add(self, key: bytes, snapshot: Snapshot) -> None:
        """Makes a snapshot known and gives up its blocks; a second one with the key is dropped."""
        is_new = key not in self._by_key
        if is_new:
            snapshot.key = key
            self._by_key[key] = snapshot
            self._by_first_block[snapshot.block_ids[0]] = snapshot
        self._release(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Gives up the blocks of a snapshot that cannot be found."""
        self._release(snapshot)

    def pin(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot until `unpin_all`, as a step reads it."""
        if not snapshot.num_holders:
            self._pool.share_bundle(snapshot.block_ids)
        snapshot.num_holders += 1
        self._pinned.append(snapshot)

    def unpin_all(self) -> None:
        """Gives up all pins; called when the step that reads them was sent."""
        for snapshot in self._pinned:
            self._release(snapshot)
        self._pinned.clear()

    def take(self, snapshot: Snapshot) -> BlockIds:
        """Turns a free snapshot into blocks that the caller holds; it can no longer be found."""
        self._pool.share_bundle(snapshot.block_ids)
        snapshot.num_holders = 1
        self._forget(snapshot)
        return snapshot.block_ids

    def forget(self, key: bytes) -> None:
        """Makes the snapshot of a key unknown, if there is one."""
        if (snapshot := self._by_key.get(key)) is not None:
            self._forget(snapshot)

    def forget_all(self, block_ids: Iterable[int]) -> None:
        """Makes those snapshots unknown whose first blocks are among these, for other content."""
        for block_id in [each for each in block_ids if each in self._by_first_block]:
            self._forget(self._by_first_block[block_id])

    def _forget(self, snapshot: Snapshot) -> None:
        assert snapshot.key is not None, "only a snapshot that is known is forgotten"
        del self._by_key[snapshot.key]
        del self._by_first_block[snapshot.block_ids[0]]
        snapshot.key = None
        self._pool.forget_bundle(snapshot.block_ids)

    def _release(self, snapshot: Snapshot) -> None:
        snapshot.num_holders -= 1
        if not snapshot.num_holders:
            self._pool.release_bundle(snapshot.block_ids, has_content=snapshot.key is not None)
