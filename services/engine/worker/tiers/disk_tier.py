"""Writes slots of the host's memory to disk and reads blocks back, in threads of its own.

The threads never hold up a step: reading, writing, digests and copies leave the interpreter to
others. A slot may get other content while its block waits to be written: each slot has a number,
which changes with every order that writes it. A thread copies a slot only if its number is still
that of the order, and a step that writes this slot waits until it has.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from protos.engine.v1.worker_pb2 import DiskReport
from services.engine.kv_cache.host_tier import DiskNews
from services.engine.worker.tiers.copy_orders import CopyOrders
from services.engine.worker.tiers.disk_store import DiskStore, LostBlockError

log = structlog.get_logger()

MAX_WAITING_WRITES = 4096
"""Blocks that wait to be written; more are dropped."""
NUM_THREADS = 8
"""That read; the first one also writes. The digest alone takes about 1 ns a byte."""
RETRY_S = 10.0
"""Time without writes after one failed."""


def disk_report(news: DiskNews) -> DiskReport:
    """Packs what has changed on the disk."""
    return DiskReport(
        added=b"".join(news.added),
        removed=b"".join(news.removed),
        arrived=b"".join(news.arrived),
        failed=b"".join(news.failed),
        read_us=news.read_us,
        num_faults=news.num_faults,
        num_drops=news.num_drops,
    )


class Done(Protocol):
    """Copies that were queued; a CUDA event."""

    def synchronize(self) -> None:
        """Waits until they are done."""


@dataclass(frozen=True, slots=True)
class _Order:
    entry: bytes
    slot: int
    number: int
    done: Done | None


class DiskTier:
    """The threads between the slots and the disk; reads come before writes."""

    def __init__(
        self, store: DiskStore, slots: torch.Tensor, report: Callable[[DiskNews], None]
    ) -> None:
        """Starts the threads.

        Args:
            store: the files; only the threads use it from now on.
            slots: [slots, words] in the host's memory.
            report: takes news, in the threads.
        """
        self._store = store
        self._slots = slots.view(torch.uint8)
        self._report = report
        self._numbers = [0] * len(slots)
        self._guard = threading.Lock()
        self._has_work = threading.Condition(self._guard)
        self._copying: set[int] = set()
        self._has_copied = threading.Condition(self._guard)
        self._reads: deque[_Order] = deque()
        self._writes: deque[_Order] = deque()
        self._num_drops = 0
        self._num_reading = 0
        self._retry_s = 0.0
        for number in range(NUM_THREADS):
            thread = threading.Thread(
                target=self._run, args=(number == 0,), name="disk tier", daemon=True
            )
            thread.start()

    def begin(self, orders: CopyOrders) -> None:
        """Voids earlier orders for the slots that a step writes; called before its copies."""
        slots = (*orders.stored_to.tolist(), *orders.read_to.tolist())
        with self._guard:
            for slot in slots:
                self._numbers[slot] += 1
            self._has_copied.wait_for(lambda: self._copying.isdisjoint(slots))

    def queue(self, orders: CopyOrders, done: Done | None) -> None:
        """Queues the writes and reads of a step whose copies are queued.

        done: after all copies that use the slots; None if they are done.
        """
        with self._guard:
            self._reads += self._orders(orders.read_entries, orders.read_to.tolist(), done)
            self._writes += self._orders(orders.stored_entries, orders.stored_to.tolist(), done)
            while len(self._writes) > MAX_WAITING_WRITES:
                self._writes.popleft()
                self._num_drops += 1
            self._has_work.notify_all()

    def _orders(
        self, entries: Sequence[bytes], slots: Sequence[int], done: Done | None
    ) -> list[_Order]:
        return [
            _Order(entry, slot, self._numbers[slot], done)
            for entry, slot in zip(entries, slots, strict=False)
        ]

    def _run(self, takes_writes: bool) -> None:  # of a thread
        block = torch.empty(self._slots.shape[1], dtype=torch.uint8)
        while True:
            with self._guard:
                while not (self._reads or (takes_writes and self._writes)):
                    self._has_work.wait()
                is_read = bool(self._reads)
                order = (self._reads or self._writes).popleft()
                news = DiskNews(num_drops=self._num_drops)
                self._num_drops = 0
                self._num_reading += is_read
                num_reading = self._num_reading
            if order.done is not None:
                order.done.synchronize()
            if is_read:
                started_ns = time.perf_counter_ns()
                self._read(order, block, news)
                if not news.removed:  # reads at the same time share the time that each takes
                    news.read_us = (time.perf_counter_ns() - started_ns) // (1000 * num_reading)
                with self._guard:
                    self._num_reading -= 1
            else:
                self._write(order, block, news)
            self._report(news)

    @contextmanager
    def _copies(self, order: _Order) -> Iterator[bool]:
        """Says whether a slot is still that of an order; if so, steps leave it until the end."""
        with self._guard:
            is_current = self._numbers[order.slot] == order.number
            if is_current:
                self._copying.add(order.slot)
        try:
            yield is_current
        finally:
            if is_current:
                with self._guard:
                    self._copying.remove(order.slot)
                    self._has_copied.notify_all()

    def _read(self, order: _Order, block: torch.Tensor, news: DiskNews) -> None:
        try:
            self._store.read(order.entry, block.numpy().data)
        except LostBlockError as error:
            news.failed.append(order.entry)
            news.removed.append(order.entry)
            news.num_faults += error.is_damaged
            log.warning("disk_block_lost", error=str(error))
            return
        with self._copies(order) as is_current:
            if is_current:
                self._slots[order.slot].copy_(block)
        (news.arrived if is_current else news.failed).append(order.entry)

    def _write(self, order: _Order, block: torch.Tensor, news: DiskNews) -> None:
        if order.entry in self._store.entries:
            return
        with self._copies(order) as is_current:
            if is_current:
                block.copy_(self._slots[order.slot])
        if not is_current or time.monotonic() < self._retry_s:
            news.num_drops += 1
            return
        try:
            news.removed += self._store.write(order.entry, block.numpy().data)
        except (OSError, ValueError) as error:
            self._retry_s = time.monotonic() + RETRY_S
            news.num_drops += 1
            log.warning("disk_write_failed", error=str(error), retry_s=RETRY_S)
            return
        if order.entry in self._store.entries:
            news.added.append(order.entry)
