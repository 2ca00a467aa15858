"""A KV cache with the host's memory below it.

A block that is reused goes there first, and a prefix that goes on there comes back: `load` copies
its blocks into free ones, which any request then finds like other cached blocks. So a request that
waits for blocks holds none, and nothing is to be undone when it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.engine.kv_cache.cache import KVCache, Prefix
from services.engine.kv_cache.host_tier import HostTier, TierCopies, tier_entry
from services.engine.kv_cache.prefix_search import PrefixSearch
from services.engine.kv_cache.states import StateCache
from services.engine.request import Request, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentBlocks:
    """The part of a request's longest prefix that the host has and the GPU lacks.

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

    def __init__(self, host: HostTier, **settings: Any) -> None:
        """Starts with all blocks free and the host's memory empty.

        Args:
            host: keeps the content of blocks that are reused.
            settings: arguments of `KVCache`.
        """
        super().__init__(**settings)
        self.host = host
        snapshots = None if self.states is None else self.states.search(self._has_snapshot)
        has_block = [partial(self._has_block, group) for group in range(len(self._groups))]
        self._present_or_below = PrefixSearch(self._groups, has_block, snapshots)

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
        length = self._present_or_below.length(keys, limit)
        if states is not None:
            length = self._present_or_below.snapshot_length(keys, length)
        num_tokens = length * self._block_size
        if num_tokens <= prefix.num_tokens:
            return None
        absent = self._absent(keys[:length])
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
            states.index.add(key, Snapshot(num_tokens=num_tokens, block_ids=pages))
        for block_id in (*reversed(blocks), *reversed(absent.held)):
            self._release(block_id)
        return len(new)

    def take_tier_copies(self, step_id: int) -> TierCopies | None:
        """Returns the copies between tiers that belong to the step sent now; None for none."""
        return self.host.take_copies(step_id)

    def undo_tier_copies(self) -> None:
        """Forgets the copies of steps in flight, which did not run."""
        for block_id in self.host.retreat():
            for index in self._indexes:
                was_known = index.forget(block_id)
                self._num_cached_blocks -= was_known and self._pool.is_free(block_id)
            if self.states is not None:
                self.states.index.forget_block(block_id)

    def _overwrite(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            for group, index in enumerate(self._indexes):
                if (key := index.key_of(block_id)) is not None:
                    self.host.store(tier_entry(key, group), block_id)
            if self.states is not None:
                snapshot = self.states.index.with_block(block_id)
                if snapshot is not None:
                    self._store_snapshot(snapshot)
        for block_id in block_ids:
            self.host.cancel_load(block_id)
        super()._overwrite(block_ids)

    def _move_snapshot(self, states: StateCache, snapshot: Snapshot) -> list[int]:
        self._store_snapshot(snapshot)
        return super()._move_snapshot(states, snapshot)

    def _store_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.key is not None, "a snapshot that is lost was known"
        entries = self._snapshot_entries(snapshot.key)
        for entry, block_id in zip(entries, snapshot.block_ids, strict=True):
            self.host.store(entry, block_id)

    def _absent(self, keys: Sequence[bytes]) -> AbsentBlocks:
        """Sorts what a prefix of full blocks with these keys needs by where it is."""
        states, last = self.states, keys[-1]
        num_tokens = len(keys) * self._block_size
        entries: list[tuple[int, bytes]] = []
        held: list[int] = []
        for group, index in enumerate(self._indexes):
            for key in keys[self._groups.first_block(group, num_tokens) :]:
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

    def _snapshot_entries(self, key: bytes) -> list[bytes]:
        """Returns the names of a snapshot's pages below the GPU."""
        assert self.states is not None, "the model has states"
        first = len(self._groups)
        return [tier_entry(key, first + page) for page in range(self.states.blocks.num_each)]
