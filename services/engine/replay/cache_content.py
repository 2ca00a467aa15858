"""The slots of the KV cache that rows use, and which of them have content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.engine.v1.batch_pb2 import BlockTableUpdates, StateMetadata
from services.engine.batch import BatchDescriptor, RowAssignment, pack_int32, read_int32
from services.engine.kv_cache.cache_groups import first_seen
from services.engine.limits import StepLimits
from services.engine.replay.recording import ReplayError
from services.engine.replay.state_content import NO_COPIES, StateContent
from services.engine.worker.inputs.batch import Batch, read_assignments, read_block_writes
from services.engine.worker.inputs.checks import Int32Array

COPIES = ("saved_from", "saved_to", "restored_from", "restored_to")
"""Fields of StateMetadata: blocks that a step copies."""

Slots = npt.NDArray[np.int64]
"""Slots of the cache: block id * block size + offset."""


class BlockNumbers:
    """Renumbers the blocks of a recording from 1, so that small caches suffice.

    For each null block of a table, outside a group's window, a replay has a block of its own:
    tokens within the window are computed after all earlier ones, row after row, whose keys and
    values it must keep meanwhile.
    """

    def __init__(self, num_recorded_blocks: int, *, table_width: int = 0) -> None:
        """Starts with no block used.

        Args:
            num_recorded_blocks: of the recorded engine.
            table_width: entries of a row of the block table, if it may have null blocks.
        """
        self._is_used = np.zeros(num_recorded_blocks, bool)
        self._is_used[0] = True  # the null block
        self._table_width = table_width
        self._has_holes = False

    @property
    def num_blocks(self) -> int:
        """Blocks used, the null block included."""
        return int(self._is_used.sum()) + (self._table_width if self._has_holes else 0)

    def use(self, block_ids: bytes) -> None:
        """Notes packed block ids.

        Raises:
            ReplayError: the recorded engine had no such block.
        """
        ids = read_int32(block_ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self._is_used):
            raise ReplayError(
                f"the recording names block {ids.max()} of {len(self._is_used)} blocks"
            )
        self._is_used[ids] = True
        self._has_holes |= bool((ids == 0).any())

    def renumber(self, updates: BlockTableUpdates) -> None:
        """Replaces the noted block ids of updates by their numbers."""
        ids = read_int32(updates.block_ids)
        used = np.cumsum(self._is_used) - 1
        numbers = used[ids]
        if self._has_holes:
            offsets, counts = read_int32(updates.offsets), read_int32(updates.counts)
            first = np.repeat(offsets - np.cumsum(counts) + counts, counts)
            columns = first + np.arange(len(ids))
            numbers = np.where(ids == 0, used[-1] + 1 + columns, numbers)
        updates.block_ids = pack_int32(numbers)

    def numbers_of(self, block_ids: bytes) -> Slots:
        """Returns the numbers of packed block ids that were noted."""
        used = np.cumsum(self._is_used) - 1
        numbers: Slots = used[read_int32(block_ids)]
        return numbers

    def renumber_copies(self, copies: StateMetadata) -> None:
        """Replaces the noted block ids of copies by their numbers."""
        used = np.cumsum(self._is_used) - 1
        for name in COPIES:
            setattr(copies, name, pack_int32(used[read_int32(getattr(copies, name))]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSlots:
    """The slots that a step writes, and the tokens that it lacks.

    written: slots of its tokens' keys and values, for each group of layers. missing: by row, the
    tokens that it reads and no step has written, to be computed before it. states: [R, blocks] of
    its rows' states. copies: [2, n], blocks of states to copy once the missing tokens are computed,
    from and to: snapshots that no step has made.
    """

    written: list[Slots]
    missing: Mapping[int, range]
    states: Slots
    copies: Slots


class CacheContent:
    """The block tables of all rows on the host, and the slots with keys and values."""

    def __init__(self, limits: StepLimits, *, num_blocks: int) -> None:
        self._limits = limits
        self._num_blocks = num_blocks
        self._windows = limits.windows
        self._table = np.zeros((limits.max_num_seqs, limits.block_table_width), np.int64)
        self._is_written = np.zeros(num_blocks * limits.block_size, bool)
        self._states = StateContent(limits)

    def restore(
        self, descriptor: BatchDescriptor, num_computed: Mapping[int, int]
    ) -> dict[int, range]:
        """Takes over rows between two steps.

        Args:
            descriptor: assigns the rows and their blocks.
            num_computed: tokens of each row with keys and values in its blocks.

        Returns:
            By row, the tokens to compute for that.
        """
        self._update(
            read_assignments(descriptor, self._limits),
            read_block_writes(descriptor, self._limits, num_blocks=self._num_blocks),
        )
        if self._limits.num_state_blocks:
            for row, end in num_computed.items():
                self._states.compute(self.state_blocks(row), end)
            return {row: self._compute_all(row, end) for row, end in num_computed.items()}
        return {row: self._missing(row, end) for row, end in num_computed.items()}

    def step(self, batch: Batch) -> StepSlots:
        """Takes over a step's changes; returns its slots."""
        self._update(batch.assignments, batch.block_writes)
        q_lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        starts = dict(zip(batch.row_ids.tolist(), (batch.seq_lens - q_lens).tolist(), strict=True))
        ends = zip(starts, batch.seq_lens.tolist(), strict=True)
        by_row = [self.slots(row, starts[row], end) for row, end in ends]
        written = [np.concatenate(slots) for slots in zip(*by_row, strict=True)]
        missing, copies = {}, NO_COPIES
        self._states.save(batch)
        for assignment in batch.assignments:
            # Others continue after an earlier step or the restored state.
            start = starts.get(assignment.row, 0)
            tokens = self._missing(assignment.row, start, besides=written)
            blocks = self.state_blocks(assignment.row)
            lacking = self._states.lacking(batch, blocks, start, lacks_tokens=bool(tokens))
            if lacking is not None:
                copies = np.concatenate((copies, lacking), axis=1)
                tokens = self._compute_all(assignment.row, start)
            if tokens:
                missing[assignment.row] = tokens
        self._is_written[joined(written)] = True
        states = np.stack([self.state_blocks(row) for row in batch.row_ids.tolist()])
        self._states.run(batch, states)
        return StepSlots(written=written, missing=missing, states=states, copies=copies)

    def lose(self, blocks: Slots) -> None:
        """Notes blocks whose content came from the host's memory, which a replay lacks."""
        self._is_written.reshape(-1, self._limits.block_size)[blocks] = False
        self._states.lose(blocks)

    def _compute_all(self, row: int, end: int) -> range:
        """Returns all tokens of a row before `end`, of which a state is, and counts them."""
        self._is_written[joined(self.slots(row, 0, end))] = True
        return range(end)

    def state_blocks(self, row: int) -> Slots:
        """Returns the blocks of a row's states."""
        blocks: Slots = self._table[row, self._limits.token_table_width :]
        return blocks

    def slots(self, row: int, start: int, end: int) -> list[Slots]:
        """Returns the slots of a row's tokens from `start` to before `end`, for each group."""
        positions = np.arange(start, end)
        size, num_groups = self._limits.block_size, len(self._windows)
        if not num_groups:
            return []
        tables = self._table[row, : self._limits.token_table_width].reshape(-1, num_groups).T
        return [table[positions // size] * size + positions % size for table in tables]

    def _update(
        self, assignments: Sequence[RowAssignment], block_writes: Int32Array | None
    ) -> None:
        for assignment in assignments:
            self._table[assignment.row] = 0
        if block_writes is not None:
            indices, block_ids = block_writes
            self._table.reshape(-1)[indices] = block_ids

    def _missing(self, row: int, end: int, *, besides: list[Slots] | None = None) -> range:
        """Returns the tokens of a row before `end` to compute, and counts them as computed.

        They run from the first without keys and values to the last, as later ones build on earlier
        ones. With a window they run from the first token, as nothing outside it is kept. `besides`
        are the slots about to be written.
        """
        all_slots = self.slots(row, 0, end)
        unwritten, needed = np.zeros(end, bool), np.zeros(end, bool)
        for group, (slots, window) in enumerate(zip(all_slots, self._windows, strict=True)):
            absent = ~self._is_written[slots]
            absent[: first_seen(window, end)] = False
            unwritten |= absent
            if besides is not None:
                absent &= ~np.isin(slots, besides[group])
            needed |= absent
        if not needed.any():
            return range(0)
        keeps_all = all(window is None for window in self._windows)
        first = int(np.flatnonzero(unwritten)[0]) if keeps_all else 0
        missing = range(first, int(np.flatnonzero(needed)[-1]) + 1)
        for slots in all_slots:
            self._is_written[slots[missing.start : missing.stop]] = True
        return missing


def joined(slots: Sequence[Slots]) -> Slots:
    """Returns the slots of all groups."""
    return np.concatenate((*slots, np.zeros(0, np.int64)))
