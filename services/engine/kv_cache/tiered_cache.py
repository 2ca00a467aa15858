"""A KV cache with the host's memory below it.

A block that is reused goes there first, and a prefix that goes on there comes back: `load` copies
its blocks into free ones, which any request then finds like other cached blocks. So a request that
waits for blocks holds none, and nothing is to be undone when it ends.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.engine.kv_cache.block_events import Tier
from services.engine.kv_cache.cache import KVCache, Prefix
from services.engine.kv_cache.host_tier import HostTier, TierCopies, key_of_entry, tier_entry
from services.engine.kv_cache.prefix_search import PrefixSearch
from services.engine.kv_cache.states import StateCache
from services.engine.request import BlockIds, Request, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentBlocks:
    """The part of a request's prefix that the host has and the GPU lacks.

    entries: layer group and key of each block, in order. snapshot: key and tokens of the state
    after the prefix, if it is absent, too. held, held_snapshot: what the GPU has of the prefix.
    num_blocks: blocks to load.
    """

    entries: list[tuple[int, bytes]]
    snapshot: tuple[bytes, int] | None
    held: list[int]
    held_snapshot: Snapshot | None
    num_blocks: int


class TieredKVCache(KVCache):
    """A KV cache whose reused blocks stay findable in the host's memory."""

    def __init__(
        self, host: HostTier, *, disk: Iterable[bytes] | None = None, **settings: Any
    ) -> None:
        """Starts with all blocks free and the host's memory empty.

        Args:
            host: keeps the content of blocks that are reused.
            disk: entries that the disk below has from earlier; None without a disk.
            settings: arguments of `KVCache`.
        """
        super().__init__(**settings)
        self.host = host
        if self._indexes:
            host.journal = self._journal
        if self.states is not None:
            self.states.on_spare = self._cancel_loads
        self.disk: set[bytes] | None = None
        """Entries on disk, of which all blocks get a copy once they are full."""
        if disk is not None:
            self.disk = set()
            self.change_disk(added=disk)
        self._full: dict[tuple[int, bytes], None] = {}
        self._full_snapshots: dict[bytes, None] = {}
        snapshots = None if self.states is None else self.states.search(self._has_snapshot)
        has_block = [partial(self._has_block, group) for group in range(len(self._groups))]
        self._present_or_below = PrefixSearch(self._groups, has_block, snapshots)
        snapshots = None if self.states is None else self.states.search(self._has_snapshot_anywhere)
        has_block = [partial(self._has_block_anywhere, group) for group in range(len(self._groups))]
        self._present_anywhere = PrefixSearch(self._groups, has_block, snapshots)

    def find_below(self, request: Request, prefix: Prefix) -> AbsentBlocks | None:
        """Returns what a longer prefix lacks on the GPU, if loading that fits and pays.

        Args:
            request: one for which `match_prefix` returned `prefix`.
            prefix: what the GPU has.
        """
        if not len(self.host):
            return None
        keys, states = request.block_keys, self.states
        limit = (len(request.token_ids) - 1) // self._block_size
        first, held = 0, []
        if self._is_plain and states is None:
            # Later steps look again, so the blocks of one and a sign that there are more will do.
            first, held = prefix.num_tokens // self._block_size, list(prefix.block_ids)
            length = self._length_for_step(keys[:limit], first)
        else:
            length = self._present_or_below.length(keys, limit)
        if states is not None:
            length = self._present_or_below.snapshot_length(keys, length)
        num_tokens = length * self._block_size
        if num_tokens <= prefix.num_tokens:
            return None
        absent = self._absent(keys[:length], first, held)
        num_kept = sum(map(self._pool.is_free, absent.held))
        kept = absent.held_snapshot
        if kept is not None and states is not None and states.index.is_free(kept):
            num_kept += len(kept.block_ids)
        if absent.num_blocks > self._pool.num_free - num_kept:
            return None
        pays = self.host.rule.pays(absent.num_blocks, num_tokens - prefix.num_tokens)
        return absent if pays else None

    def load(self, absent: AbsentBlocks) -> int:
        """Orders copies of absent blocks into free ones, which are then cached like any other.

        Returns:
            The blocks that the step being planned loads; a later one loads the rest, if they are
            fewer than all.
        """
        host, states = self.host, self.states
        is_whole = absent.num_blocks <= host.room
        entries = absent.entries[: host.room]
        slots = [host.use(tier_entry(key, group)) for group, key in entries]
        if is_whole and absent.snapshot is not None:
            slots += map(host.use, self._snapshot_entries(absent.snapshot[0]))
        # The rest of the prefix must not take what the GPU has of it.
        for block_id in absent.held:
            self._num_cached_blocks -= self._pool.share(block_id)
        if absent.held_snapshot is not None and states is not None:
            states.index.pin(absent.held_snapshot)
        new = self._take(len(slots))
        for slot, block_id in zip(slots, new, strict=True):
            host.load(slot, block_id)
        blocks, pages = new[: len(entries)], new[len(entries) :]
        for (group, key), block_id in zip(entries, blocks, strict=True):
            self._indexes[group].add(key, block_id)
        if pages and absent.snapshot is not None and states is not None:
            key, num_tokens = absent.snapshot
            states.index.add(key, Snapshot(num_tokens=num_tokens, block_ids=array("i", pages)))
        for block_id in (*reversed(blocks), *reversed(absent.held)):
            self._release(block_id)
        return len(new)

    def read_ahead(self, request: Request) -> tuple[set[bytes], int]:
        """Orders reads of blocks that only the disk has of a request's prefix, if that pays.

        Returns:
            The entries that the request waits for, and the tokens that it gains by them.
        """
        if not self.disk:
            return set(), 0
        prefix, keys, states = self.match_prefix(request), request.block_keys, self.states
        limit = (len(request.token_ids) - 1) // self._block_size
        below = self._present_or_below.length(keys, limit)
        limit = min(limit, below + self.host.read_room // max(1, len(self._groups)))
        length = self._present_anywhere.length(keys, limit)
        if states is not None:
            below = self._present_or_below.snapshot_length(keys, below)
            length = self._present_anywhere.snapshot_length(keys, length)
        num_gained = length * self._block_size - max(prefix.num_tokens, below * self._block_size)
        if num_gained <= 0:
            return set(), 0
        absent = self._absent(keys[:length])
        entries = [tier_entry(key, group) for group, key in absent.entries]
        if absent.snapshot is not None:
            entries += self._snapshot_entries(absent.snapshot[0])
        wanted = {each for each in entries if each not in self.host}
        new = [each for each in entries if each in wanted and not self.host.is_reading(each)]
        has_room = len(new) <= self.host.read_room
        if not has_room or not self.host.rule.pays(len(entries), num_gained, num_reads=len(wanted)):
            return set(), 0
        if not all(map(self.host.read, new)):
            return set(), 0
        return wanted, num_gained

    def change_disk(self, *, added: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Notes entries that the disk has lost and got."""
        assert self.disk is not None, "there is a disk"
        for entry in removed:
            if entry in self.disk:
                self.disk.remove(entry)
                self._note_on_disk(entry, is_present=False)
        for entry in added:
            if entry not in self.disk:
                self.disk.add(entry)
                self._note_on_disk(entry, is_present=True)

    def begin_step(self) -> None:
        """Stores what became full before the step being planned, for the disk."""
        if not (self._full or self._full_snapshots):
            return
        for group, key in list(self._full)[: self.host.room]:
            del self._full[group, key]
            block_id = self._indexes[group].block_of(key)
            if block_id is not None:
                self.host.store(tier_entry(key, group), block_id)
        for key in self._full_snapshots if self.states is not None else ():
            snapshot = self.states.index.find(key) if self.states is not None else None
            if snapshot is not None:
                self._store_snapshot(snapshot)
        self._full_snapshots.clear()

    @property
    def has_copies(self) -> bool:
        """Whether the next step has copies, even without a request."""
        return bool(self.host.has_copies or self._full or self._full_snapshots)

    def cache_full_blocks(self, request: Request) -> None:
        """Adds the request's full, computed blocks to the prefix index."""
        first, snapshots = request.num_indexed_blocks, list(request.snapshots)
        super().cache_full_blocks(request)
        if self.disk is None:
            return
        for key in request.block_keys[first : request.num_indexed_blocks]:
            for group, index in enumerate(self._indexes):
                if index.has(key) and tier_entry(key, group) not in self.disk:
                    self._full[group, key] = None
        for snapshot in snapshots:
            if snapshot.key is not None:
                self._full_snapshots[snapshot.key] = None

    def take_tier_copies(self, step_id: int) -> TierCopies | None:
        """Returns the copies between tiers that belong to the step sent now; None for none."""
        return self.host.take_copies(step_id)

    def undo_tier_copies(self) -> list[bytes]:
        """Forgets the copies of steps in flight, which did not run; returns what they read."""
        block_ids, reads = self.host.retreat()
        for block_id in block_ids:
            for index in self._indexes:
                was_known = index.forget(block_id)
                self._num_cached_blocks -= was_known and self._pool.is_free(block_id)
        if self.states is not None:
            self.states.index.forget_all(block_ids)
        return reads

    def _overwrite(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            for group, index in enumerate(self._indexes):
                if (key := index.key_of(block_id)) is not None:
                    self.host.store(tier_entry(key, group), block_id)
            if self.states is not None:
                snapshot = self.states.index.with_block(block_id)
                if snapshot is not None:
                    self._store_snapshot(snapshot)
        self._cancel_loads(block_ids)
        super()._overwrite(block_ids)

    def _cancel_loads(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.host.cancel_load(block_id)

    def _move_snapshot(self, states: StateCache, snapshot: Snapshot) -> BlockIds:
        self._store_snapshot(snapshot)
        return super()._move_snapshot(states, snapshot)

    def _store_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.key is not None, "a snapshot that is lost was known"
        entries = self._snapshot_entries(snapshot.key)
        for entry, block_id in zip(entries, snapshot.block_ids, strict=True):
            self.host.store(entry, block_id)

    def _length_for_step(self, keys: Sequence[bytes], length: int) -> int:
        """Returns the length of a known prefix up to one more absent block than a step loads.

        length: leading blocks that the GPU is known to have.
        """
        index, num_left = self._indexes[0], self.host.room + 1
        while length < len(keys) and num_left and self._has_block(0, keys[length]):
            num_left -= not index.has(keys[length])
            length += 1
        return length

    def _absent(
        self, keys: Sequence[bytes], first: int = 0, held: Sequence[int] = ()
    ) -> AbsentBlocks:
        """Sorts what a prefix of full blocks with these keys needs by where it is.

        first, held: leading blocks that the GPU is known to have, and which these are.
        """
        states, last = self.states, keys[-1]
        num_tokens = len(keys) * self._block_size
        entries: list[tuple[int, bytes]] = []
        held = list(held)
        for group, index in enumerate(self._indexes):
            for key in keys[max(first, self._groups.first_block(group, num_tokens)) :]:
                block_id = index.block_of(key)
                if block_id is None:
                    entries.append((group, key))
                else:
                    held.append(block_id)
        held_snapshot = None if states is None else states.index.find(last)
        is_absent = states is not None and held_snapshot is None
        num_pages = states.blocks.num_each if states is not None and is_absent else 0
        return AbsentBlocks(
            entries=entries,
            snapshot=(last, num_tokens) if is_absent else None,
            held=held,
            held_snapshot=held_snapshot,
            num_blocks=len(entries) + num_pages,
        )

    def _has_block(self, group: int, key: bytes) -> bool:
        """Whether the GPU or the host has a block."""
        return self._indexes[group].has(key) or tier_entry(key, group) in self.host

    def _has_snapshot(self, key: bytes) -> bool:
        """Whether the GPU or the host has a snapshot."""
        assert self.states is not None, "the model has states"
        if self.states.index.has(key):
            return True
        return all(entry in self.host for entry in self._snapshot_entries(key))

    def _has_block_anywhere(self, group: int, key: bytes) -> bool:
        """Whether the GPU, the host or the disk has a block."""
        return self._has_block(group, key) or self._is_on_disk(tier_entry(key, group))

    def _has_snapshot_anywhere(self, key: bytes) -> bool:
        """Whether the GPU, the host or the disk has a snapshot."""
        return self._has_snapshot(key) or all(
            entry in self.host or self._is_on_disk(entry) for entry in self._snapshot_entries(key)
        )

    def _note_on_disk(self, entry: bytes, *, is_present: bool) -> None:
        key = key_of_entry(entry)
        if key is None or not self._indexes:
            return
        if is_present:
            self._journal.stored(key, tier=Tier.DISK)
        else:
            self._journal.removed(key, Tier.DISK)

    def _is_on_disk(self, entry: bytes) -> bool:
        return self.disk is not None and entry in self.disk

    def _snapshot_entries(self, key: bytes) -> list[bytes]:
        """Returns the names of a snapshot's pages below the GPU."""
        assert self.states is not None, "the model has states"
        first = len(self._groups)
        return [tier_entry(key, first + page) for page in range(self.states.blocks.num_each)]
