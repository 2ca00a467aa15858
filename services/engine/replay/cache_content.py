"""Which slots of the KV cache a row uses, and which of them have keys and values in them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine.batch import BatchDescriptor, pack_int32, read_int32
from services.engine.replay.recording import ReplayError
from services.engine.worker.step_arrays import (
    BlockWrites,
    StepArrays,
    StepLimits,
    check_assignments,
)

Slots = npt.NDArray[np.int64]
"""Places in the cache by block id * block size + offset."""


class BlockNumbers:
    """Numbers the blocks that a recording names from 1 on: a cache of those alone is enough."""

    def __init__(self, num_recorded_blocks: int) -> None:
        self._is_used = np.zeros(num_recorded_blocks, bool)
        self._is_used[0] = True  # the null block

    @property
    def num_blocks(self) -> int:
        """Blocks used, the null block included."""
        return int(self._is_used.sum())

    def use(self, block_ids: bytes) -> None:
        """Notes packed block ids.

        Raises:
            ReplayError: the engine that was recorded had no such block.
        """
        ids = read_int32(block_ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self._is_used):
            raise ReplayError(
                f"the recording names block {ids.max()} of {len(self._is_used)} blocks"
            )
        self._is_used[ids] = True

    def renumber(self, block_ids: bytes) -> bytes:
        """Returns the numbers of packed block ids that were noted, packed."""
        numbers = np.cumsum(self._is_used) - 1
        return pack_int32(numbers[read_int32(block_ids)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSlots:
    """What a step does to the cache.

    written: where its tokens' keys and values go. missing: by row, the tokens whose keys and values
    it reads and nobody has written; they must be computed before it.
    """

    written: Slots
    missing: Mapping[int, range]


class CacheContent:
    """The block tables of all rows on the host, and the slots that hold keys and values."""

    def __init__(self, limits: StepLimits, *, num_blocks: int) -> None:
        self._limits = limits
        self._num_blocks = num_blocks
        self._table = np.zeros((limits.max_num_seqs, limits.max_blocks_per_seq), np.int64)
        self._is_written = np.zeros(num_blocks * limits.block_size, bool)

    def restore(
        self, descriptor: BatchDescriptor, num_computed: Mapping[int, int]
    ) -> dict[int, range]:
        """Takes over rows as they are between two steps.

        Args:
            descriptor: assigns them and their blocks.
            num_computed: tokens of each whose keys and values are in its blocks.

        Returns:
            By row, the tokens that must be computed for that.
        """
        self._update(descriptor)
        return {row: self._missing(row, end) for row, end in num_computed.items()}

    def step(self, descriptor: BatchDescriptor, arrays: StepArrays) -> StepSlots:
        """Takes over what a step does, and what must be done before it."""
        self._update(descriptor)
        q_lens = arrays.query_start_loc[1:] - arrays.query_start_loc[:-1]
        starts = dict(
            zip(arrays.row_ids.tolist(), (arrays.seq_lens - q_lens).tolist(), strict=True)
        )
        ends = zip(starts, arrays.seq_lens.tolist(), strict=True)
        written = np.concatenate([self.slots(row, starts[row], end) for row, end in ends])
        missing = {}
        for assignment in descriptor.row_assignments:
            # Others go on where an earlier step, or what was restored, has left off.
            start = starts.get(assignment.row, 0)
            if tokens := self._missing(assignment.row, start, besides=written):
                missing[assignment.row] = tokens
        self._is_written[written] = True
        return StepSlots(written=written, missing=missing)

    def slots(self, row: int, start: int, end: int) -> Slots:
        """Returns where a row's tokens from `start` to before `end` are."""
        positions = np.arange(start, end)
        size = self._limits.block_size
        slots: Slots = self._table[row, positions // size] * size + positions % size
        return slots

    def _update(self, descriptor: BatchDescriptor) -> None:
        check_assignments(descriptor, self._limits)
        for assignment in descriptor.row_assignments:
            self._table[assignment.row] = 0
        writes = BlockWrites.read(descriptor, self._limits, num_blocks=self._num_blocks)
        if writes is not None:
            indices, block_ids = writes.entries
            self._table.reshape(-1)[indices] = block_ids

    def _missing(self, row: int, end: int, *, besides: Slots | None = None) -> range:
        """Returns the tokens of a row before `end` that must be computed, and counts them in.

        They run from the first one without keys and values to the last: those between are computed
        with them, as the later ones build on the earlier. `besides` are about to be written.
        """
        slots = self.slots(row, 0, end)
        unwritten = np.flatnonzero(~self._is_written[slots])
        needed = unwritten
        if besides is not None:
            needed = unwritten[~np.isin(slots[unwritten], besides)]
        if not len(needed):
            return range(0)
        missing = range(int(unwritten[0]), int(needed[-1]) + 1)
        self._is_written[slots[missing.start : missing.stop]] = True
        return missing
