"""The fake worker's KV cache: what each slot of each block holds, and which blocks a row has.

The content of a position is a key, a hash of all tokens up to it. A row may only read slots
that hold its own keys. The blocks of a row's state hold the key of the last token before it.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from protos.engine.v1.batch_pb2 import BlockCopies, BlockTableUpdates, StateMetadata
from services.engine.batch import read_int32
from services.engine.kv_cache.host_tier import ENTRY_BYTES, DiskNews
from services.engine.kv_cache.state_blocks import StateBlocks
from tests.support.fake_model import require

NULL_BLOCK = 0
_GARBAGE = 1
_STATE = np.uint64(77)


class FakeCache:
    """Blocks of slots and a block table, whose rows have each block of each group in turn."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        state_blocks: StateBlocks | None = None,
        num_host_slots: int = 0,
        disk: dict[bytes, np.ndarray] | None = None,
    ) -> None:
        self._block_size = block_size
        self._windows = tuple(windows)
        width = -(-max_model_len // block_size) * len(windows)  # group after group for each block
        self._token_width = width
        self._states = state_blocks
        num_of_states = 0 if state_blocks is None else state_blocks.num_live
        self._block_table = np.full((max_num_seqs, width + num_of_states), NULL_BLOCK, np.int32)
        self._kv = np.zeros((num_blocks, block_size), np.uint64)
        self._host = np.zeros((num_host_slots, block_size), np.uint64)
        self.disk = {} if disk is None else disk
        self._reads: list[tuple[bytes, int]] = []
        self._news = DiskNews()

    def clear_row(self, row: int) -> None:
        """Takes all blocks from a row."""
        self._block_table[row] = NULL_BLOCK

    def update_block_table(self, updates: BlockTableUpdates) -> None:
        """Gives blocks to rows."""
        ids = read_int32(updates.block_ids)
        columns = (read_int32(data) for data in (updates.rows, updates.offsets, updates.counts))
        position = 0
        for row, offset, count in zip(*columns, strict=True):
            new = ids[position : position + count]
            require(len(new) == count > 0, "block ids are missing")
            keeps_all = [window is None for window in self._windows]
            is_state = offset >= self._token_width
            # Updates begin with the first group.
            kept = np.ones(count, bool) if is_state else np.resize(keeps_all, count)
            require(bool(np.all(new[kept] > NULL_BLOCK)), "the null block was handed out")
            require(bool(np.all(new < len(self._kv))), "a block does not exist")
            before = self._block_table[row, offset - 1]
            require(offset in (0, self._token_width) or before != NULL_BLOCK, "a gap")
            self._block_table[row, offset : offset + count] = new
            position += count
        require(position == len(ids), "block ids are left over")

    def write(self, spans: Iterable[tuple[int, int, int]], keys: Sequence[np.ndarray]) -> None:
        """Writes a step's keys.

        Args:
            spans: row, first position and end of each request.
            keys: those of each request's row, for all positions.
        """
        flat = self._kv.reshape(-1)
        written: set[int] = set()
        for (row, start, end), row_keys in zip(spans, keys, strict=True):
            if self._states is not None:
                slots = self._write_states(self._states, row, start, end, row_keys)
                require(written.isdisjoint(slots), f"row {row} shares a state")
                written.update(slots)
            for group in range(len(self._windows)):
                slots = self._slots(row, start, end, group)
                require(bool(np.all(slots >= self._block_size)), f"row {row} writes the null block")
                require(written.isdisjoint(slots.tolist()), f"row {row} writes another row's slot")
                written.update(slots.tolist())
                flat[slots] = row_keys[start:end] + np.uint64(group)

    def _write_states(
        self, states: StateBlocks, row: int, start: int, end: int, row_keys: np.ndarray
    ) -> set[int]:
        """Writes the states after a request's tokens; returns the slots of all of its states.

        A step of more tokens than it has states keeps the last one.
        """
        blocks = self._block_table[row, self._token_width :]
        require(bool(np.all(blocks > NULL_BLOCK)), f"row {row} has no state")
        held = self._kv[states.after(blocks, start)]
        is_own = start == 0 or bool(np.all(held == row_keys[start - 1] + _STATE))
        require(is_own, f"row {row} would go on from a foreign state")
        first = start if end - start <= states.num_slots else end - 1
        for position in range(first, end):
            self._kv[states.after(blocks, position + 1)] = row_keys[position] + _STATE
        slots = np.arange(self._block_size) + blocks[:, None] * self._block_size
        return set(slots.ravel().tolist())

    def check_reads(self, row: int, start: int, end: int, keys: np.ndarray) -> None:
        """Compares what a row's queries from `start` to `end` read with the row's keys."""
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, start - window + 1)
            held = self._kv.reshape(-1)[self._slots(row, first, end, group)]
            expected = keys[first:end] + np.uint64(group)
            wrong = np.flatnonzero(held != expected) + first
            require(
                not len(wrong), f"row {row} would read foreign keys and values at {wrong.tolist()}"
            )

    def require_room(self, row: int, start: int, end: int) -> None:
        """Requires that a row has blocks to draft from `start` to `end`."""
        for group in range(len(self._windows)):
            slots = self._slots(row, start, end, group)
            require(bool(np.all(slots >= self._block_size)), f"row {row} has no room to draft")

    def copy_states(self, copies: StateMetadata) -> None:
        """Copies blocks, first saved and then restored ones."""
        for sources, targets in (
            (copies.saved_from, copies.saved_to),
            (copies.restored_from, copies.restored_to),
        ):
            to = read_int32(targets)
            require(len(set(to.tolist())) == len(to), "a block is written twice")
            require(bool(np.all(to > NULL_BLOCK)), "a state goes into the null block")
            self._kv[to] = self._kv[read_int32(sources)]

    def copy_blocks(self, copies: BlockCopies, *, max_loads: int) -> None:
        """Stores blocks in the host's memory and loads others; reads all before it writes any."""
        stored_from, stored_to, loaded_from, loaded_to = (
            read_int32(data)
            for data in (
                copies.stored_from, copies.stored_to, copies.loaded_from, copies.loaded_to,
            )
        )  # fmt: skip
        for to in (stored_to, loaded_to):
            require(len(set(to.tolist())) == len(to), "a copy is overwritten")
        require(bool(np.all(loaded_to > NULL_BLOCK)), "the null block is loaded")
        require(len(loaded_to) <= max_loads, "a step loads too much")
        stored, loaded = self._kv[stored_from], self._host[loaded_from]
        self._host[stored_to] = stored
        self._kv[loaded_to] = loaded
        self._order_disk(copies, stored_to.tolist())

    def _order_disk(self, copies: BlockCopies, stored_to: list[int]) -> None:
        reads = list(zip(_names(copies.read_entries), read_int32(copies.read_to), strict=True))
        voided = {*stored_to, *(slot for _, slot in reads)}
        self._news.failed += [entry for entry, slot in self._reads if slot in voided]
        self._reads = [each for each in self._reads if each[1] not in voided] + reads
        if copies.stored_entries:
            for entry, slot in zip(_names(copies.stored_entries), stored_to, strict=True):
                self.disk[entry] = self._host[slot].copy()
                self._news.added.append(entry)

    def take_disk_news(self) -> DiskNews:
        """Ends all reads and returns what has happened on the disk since the last call."""
        news, self._news = self._news, DiskNews()
        for entry, slot in self._reads:
            if entry in self.disk:
                self._host[slot] = self.disk[entry]
                news.arrived.append(entry)
            else:
                news.failed.append(entry)
                news.removed.append(entry)
        self._reads.clear()
        return news

    def spoil(
        self,
        updates: BlockTableUpdates,
        starts: Mapping[int, int],
        copies: StateMetadata,
        block_copies: BlockCopies,
    ) -> None:
        """Makes new blocks wrong from the first position that their row's failed step writes.

        So are the states of its rows and the copies that it makes.
        """
        self._kv[read_int32(block_copies.loaded_to)] = _GARBAGE
        self._host[read_int32(block_copies.stored_to)] = _GARBAGE
        self._kv[read_int32(copies.saved_to)] = _GARBAGE
        self._kv[read_int32(copies.restored_to)] = _GARBAGE
        self._kv[self._block_table[list(starts), self._token_width :]] = _GARBAGE
        counts = read_int32(updates.counts)
        block_ids = np.split(read_int32(updates.block_ids), np.cumsum(counts)[:-1])
        offsets = read_int32(updates.offsets)
        for row, offset, new in zip(read_int32(updates.rows), offsets, block_ids, strict=False):
            # A shared prefix is named, but not written.
            num_computed = starts[row] // self._block_size * len(self._windows)
            num_kept = max(0, num_computed - offset)
            self._kv[new[num_kept:]] = _GARBAGE

    def _slots(self, row: int, start: int, end: int, group: int) -> np.ndarray:
        positions = np.arange(start, end)
        table = self._block_table[row, group : self._token_width : len(self._windows)]
        blocks = table[positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


def _names(data: bytes) -> list[bytes]:
    return [data[start : start + ENTRY_BYTES] for start in range(0, len(data), ENTRY_BYTES)]
