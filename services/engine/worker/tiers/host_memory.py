"""Slots of the host's memory, each of a whole block, and the copies between them and the cache."""

import time
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import BatchDescriptor
from services.engine.worker.inputs.checks import Int32Array, require
from services.engine.worker.tiers.block_memory import BlockMemory
from services.engine.worker.tiers.copy_orders import CopyOrders
from services.engine.worker.tiers.disk_tier import DiskTier, Done

NUM_MEASURED_LOADS = 3
"""The fastest counts: the first prepares its kernels, and others may have had the processor."""


class HostMemory(Protocol):
    """Keeps the content of blocks in slots; one contiguous piece a block."""

    num_slots: int
    max_step_loads: int
    disk: DiskTier | None

    @property
    def slots(self) -> Tensor:
        """The content of the slots, [slots, words]."""

    def copy(self, orders: CopyOrders) -> None:
        """Makes or queues the copies of a step, before the step computes.

        All blocks and slots are read before any is written.
        """

    def take_elapsed_us(self) -> int:
        """Returns the microseconds of the copies that ended since the last call."""

    def synchronize(self) -> None:
        """Waits until all queued copies are done."""

    def mark(self) -> Done | None:
        """Returns the end of all copies queued so far; None if they are done."""


class PlainHostMemory:
    """Slots of a model on a CPU: copies are done when `copy` returns."""

    def __init__(self, blocks: BlockMemory, *, num_slots: int, max_step_loads: int) -> None:
        """Allocates the slots.

        Args:
            blocks: of the cache.
            num_slots: blocks to keep.
            max_step_loads: most blocks that a step may load.
        """
        self.num_slots = num_slots
        self.max_step_loads = max_step_loads
        self.disk: DiskTier | None = None
        self._blocks = blocks
        self.slots = torch.empty((num_slots, blocks.num_words), dtype=blocks.word)
        self._elapsed_ns = 0

    def copy(self, orders: CopyOrders) -> None:
        """Makes the copies of a step."""
        started_ns = time.perf_counter_ns()
        stored = self.slots.new_empty((len(orders.stored_from), self._blocks.num_words))
        self._blocks.read(_indices(orders.stored_from), stored)
        self._blocks.write(
            _indices(orders.loaded_to), self.slots.index_select(0, _indices(orders.loaded_from))
        )
        self.slots.index_copy_(0, _indices(orders.stored_to), stored)
        self._elapsed_ns += time.perf_counter_ns() - started_ns

    def take_elapsed_us(self) -> int:
        """Returns the microseconds of the copies since the last call."""
        elapsed_us, self._elapsed_ns = self._elapsed_ns // 1000, 0
        return elapsed_us

    def synchronize(self) -> None:
        """Returns at once."""

    def mark(self) -> Done | None:
        """Returns None: all copies are done."""


def copy_blocks(descriptor: BatchDescriptor, host: HostMemory | None, *, num_blocks: int) -> int:
    """Makes or queues the copies of a step; returns the microseconds of ended copies.

    Args:
        descriptor: the step.
        host: the slots; None without any.
        num_blocks: of the pool.

    Raises:
        ValueError: the copies contradict themselves or the slots.
    """
    if host is None:
        require(not descriptor.HasField("block_copies"), "copies of blocks without slots")
        return 0
    sizes = {"num_slots": host.num_slots, "max_loads": host.max_step_loads}
    orders = CopyOrders.read(descriptor, num_blocks=num_blocks, **sizes)
    if orders is not None and host.disk is None:
        host.copy(orders)
    elif orders is not None and host.disk is not None:
        host.disk.begin(orders)
        host.copy(orders)
        host.disk.queue(orders, host.mark())
    return host.take_elapsed_us()


def measure_load_s(host: HostMemory, num_blocks: int) -> float:
    """Returns the least seconds that loading a block took, before any block is in use.

    Args:
        host: the slots.
        num_blocks: blocks of the pool, whose content stays as it is.
    """
    count = min(host.num_slots, host.max_step_loads, num_blocks - 1)
    blocks = np.arange(1, 1 + count, dtype=np.int32)
    slots, none = blocks - 1, blocks[:0]
    host.copy(CopyOrders(stored_from=blocks, stored_to=slots, loaded_from=none, loaded_to=none))
    host.synchronize()
    elapsed_s = []
    for _ in range(NUM_MEASURED_LOADS):
        started_s = time.perf_counter()
        host.copy(CopyOrders(stored_from=none, stored_to=none, loaded_from=slots, loaded_to=blocks))
        host.synchronize()
        elapsed_s.append(time.perf_counter() - started_s)
    host.take_elapsed_us()
    return min(elapsed_s) / count


def _indices(numbers: Int32Array) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64))
