"""Mapped addresses of a GPU: what is taken, given back and taken again, all or none."""

import ctypes

import pytest

from services.engine.worker.sleep import virtual_memory
from services.engine.worker.sleep.device_pages import MappedRange
from services.engine.worker.sleep.virtual_memory import VirtualMemoryDriver

BEGIN, GRANULARITY = 2**30, 2**21


class FakeDriver:
    """Counts mapped bytes of a GPU."""

    granularity = GRANULARITY

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        self.reserved = 0
        self.mapped = {}

    def reserve(self, num_bytes):
        self.reserved = num_bytes
        return BEGIN

    def map(self, address, num_bytes):
        assert not address % GRANULARITY
        assert not num_bytes % GRANULARITY
        if sum(self.mapped.values()) + num_bytes > self.num_bytes:
            raise MemoryError
        self.mapped[address] = num_bytes

    def unmap(self, address, num_bytes):
        assert self.mapped.pop(address) == num_bytes


def test_small_pieces_share_pages_and_begin_aligned():
    driver = FakeDriver(10 * GRANULARITY)
    memory = MappedRange(driver, 9 * GRANULARITY + 1)
    assert driver.reserved == 10 * GRANULARITY
    addresses = [memory.take(size) for size in (1, 513, 3 * GRANULARITY, 7)]
    assert addresses == [BEGIN, BEGIN + 512, BEGIN + 1536, BEGIN + 1536 + 3 * GRANULARITY]
    assert memory.num_bytes == sum(driver.mapped.values()) == 4 * GRANULARITY


def test_memory_comes_back_at_the_same_addresses():
    driver = FakeDriver(10 * GRANULARITY)
    memory = MappedRange(driver, 9 * GRANULARITY)
    for size in (GRANULARITY, 2 * GRANULARITY, 5):
        memory.take(size)
    mapped = dict(driver.mapped)
    memory.unmap()
    assert not driver.mapped
    memory.map()
    assert driver.mapped == mapped


def test_without_enough_memory_nothing_stays_mapped():
    driver = FakeDriver(4 * GRANULARITY)
    memory = MappedRange(driver, 9 * GRANULARITY)
    memory.take(2 * GRANULARITY)
    memory.take(2 * GRANULARITY)
    with pytest.raises(MemoryError):
        memory.take(1)
    assert memory.num_bytes == 4 * GRANULARITY
    memory.unmap()
    driver.num_bytes = 3 * GRANULARITY
    with pytest.raises(MemoryError):
        memory.map()
    assert not driver.mapped
    driver.num_bytes = 4 * GRANULARITY
    memory.map()
    assert memory.num_bytes == sum(driver.mapped.values())


def test_structures_have_the_sizes_of_the_drivers():
    assert ctypes.sizeof(virtual_memory._Properties) == 32
    assert ctypes.sizeof(virtual_memory._Access) == 12


def test_a_machine_without_a_driver_says_what_needs_it(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_DRIVER", "libabsent.so")
    with pytest.raises(ValueError, match="--enable-sleep needs CUDA's virtual memory"):
        VirtualMemoryDriver(0)
