"""Slots in pinned memory, and copies by DMA beside the computation.

A step's blocks are gathered into a staging buffer of the device and scattered from another one, on
the stream that computes: so the order of copies and steps is that of the stream. Between these
buffers and the slots a stream of its own copies each block in one piece. A step's loads are on
their way as soon as the step is ordered, while the step before it computes.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from services.engine.worker.inputs.checks import Int32Array
from services.engine.worker.inputs.transfer import to_device
from services.engine.worker.pinned_pages import PinnedPages
from services.engine.worker.tiers.block_memory import BlockMemory
from services.engine.worker.tiers.copy_orders import CopyOrders
from services.engine.worker.tiers.disk_tier import DiskTier


class PinnedHostMemory:
    """Slots of a model on a GPU."""

    def __init__(self, blocks: BlockMemory, *, num_slots: int, max_step_loads: int) -> None:
        """Allocates and pins the slots, and two staging buffers of `max_step_loads` blocks.

        Args:
            blocks: of the cache.
            num_slots: blocks to keep.
            max_step_loads: most blocks that a step may load.

        Raises:
            ValueError: the system lets this process pin less memory.
        """
        self.num_slots = num_slots
        self.max_step_loads = max_step_loads
        self.disk: DiskTier | None = None
        self._blocks = blocks
        self._pages = _pinned(num_slots * blocks.num_words * blocks.word.itemsize)
        self.slots = self._pages.memory.view(blocks.word).view(num_slots, blocks.num_words)
        shape = (max_step_loads, blocks.num_words)
        self._outgoing = torch.empty(shape, dtype=blocks.word, device=blocks.device)
        self._incoming = torch.empty(shape, dtype=blocks.word, device=blocks.device)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]  # torch has no types here
        # When the last copy out of each staging buffer is queued to end.
        self._outgoing_is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        self._incoming_is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def copy(self, orders: CopyOrders) -> None:
        """Queues the copies of a step on the current stream and the copying one.

        Slots are read on the copying stream before it writes any, and blocks on the current one
        before it writes any; the loads fit into their buffer, so nothing here waits for a later
        copy of the same step.
        """
        computing = torch.cuda.current_stream(self._blocks.device)
        arrived = self._fetch(orders.loaded_from)
        for first in range(0, len(orders.stored_from), self.max_step_loads):
            piece = slice(first, first + self.max_step_loads)
            self._store(orders.stored_from[piece], orders.stored_to[piece], computing)
        if arrived is not None:
            computing.wait_event(arrived)
            self._blocks.write(
                self._indices(orders.loaded_to), self._incoming[: len(orders.loaded_to)]
            )
            self._incoming_is_free.record(computing)

    def take_elapsed_us(self) -> int:
        """Returns the microseconds of the copies that ended since the last call."""
        elapsed_ms = 0.0
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]  # as above
            begin, end = self._timed.popleft()
            elapsed_ms += begin.elapsed_time(end)
        return int(1000 * elapsed_ms)

    def synchronize(self) -> None:
        """Waits until all queued copies are done."""
        self._stream.synchronize()
        torch.cuda.current_stream(self._blocks.device).synchronize()

    def mark(self) -> torch.cuda.Event:
        """Returns the end of all copies queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        event.record(self._stream)
        return event

    def _fetch(self, slots: Int32Array) -> torch.cuda.Event | None:
        """Queues copies of slots into the buffer; returns when they are there."""
        if not len(slots):
            return None
        self._stream.wait_event(self._incoming_is_free)
        begin = self._timestamp()
        with torch.cuda.stream(self._stream):
            for first, slot, count in _runs(slots):
                rows = self._incoming[first : first + count]
                rows.copy_(self.slots[slot : slot + count], non_blocking=True)
        self._timed.append((begin, self._timestamp()))
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        arrived.record(self._stream)
        return arrived

    def _store(
        self, block_ids: Int32Array, slots: Int32Array, computing: torch.cuda.Stream
    ) -> None:
        """Queues copies of at most a buffer's blocks to slots."""
        computing.wait_event(self._outgoing_is_free)
        self._blocks.read(self._indices(block_ids), self._outgoing[: len(block_ids)])
        self._stream.wait_stream(computing)
        begin = self._timestamp()
        with torch.cuda.stream(self._stream):
            for first, slot, count in _runs(slots):
                rows = self.slots[slot : slot + count]
                rows.copy_(self._outgoing[first : first + count], non_blocking=True)
        self._timed.append((begin, self._timestamp()))
        self._outgoing_is_free.record(self._stream)

    def _timestamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        event.record(self._stream)
        return event

    def _indices(self, numbers: Int32Array) -> Tensor:
        return to_device(numbers.astype(np.int64), self._blocks.device)


def _runs(slots: Int32Array) -> list[tuple[int, int, int]]:
    """Returns the runs of consecutive slots: index of the first, its slot, and their number."""
    starts = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 2) != 1).tolist()
    ends = [*starts[1:], len(slots)]
    return [
        (start, int(slots[start]), end - start) for start, end in zip(starts, ends, strict=True)
    ]


def _pinned(num_bytes: int) -> PinnedPages:
    """Returns pages for all slots."""
    pages = PinnedPages(num_bytes)
    if pages.status:
        raise ValueError(
            f"{num_bytes / 2**30:.1f} GiB of the host's memory cannot be pinned (CUDA error "
            f"{pages.status}). Lower --host-kv-gb, or raise the limit of locked memory (ulimit -l)"
        )
    return pages
