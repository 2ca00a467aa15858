"""The thread between slots and disk: it never takes one slot's content for another's."""

import errno
import queue
import threading

import numpy as np
import pytest
import torch

from services.engine.kv_cache.host_tier import ENTRY_BYTES
from services.engine.worker.tiers import disk_tier
from services.engine.worker.tiers.copy_orders import CopyOrders
from services.engine.worker.tiers.disk_store import DiskStore
from services.engine.worker.tiers.disk_tier import DiskTier

NUM_SLOTS, NUM_WORDS = 8, 64
NONE = np.zeros(0, np.int32)


class Gate:
    """Copies that a test ends."""

    def __init__(self):
        self._event = threading.Event()

    def synchronize(self):
        assert self._event.wait(30)

    def end(self):
        self._event.set()


class Rig:
    def __init__(self, folder):
        self.store = DiskStore(folder.resolve() / "kv", identity=bytes(32), max_bytes=2**20)
        self.slots = torch.zeros(NUM_SLOTS, NUM_WORDS, dtype=torch.int64)
        self.news = queue.Queue()
        self.tier = DiskTier(self.store, self.slots, self.news.put)

    def order(self, *, stored=(), reads=(), done=None):
        """Stores pairs of a slot and a number that fills it; reads pairs of a number and a slot."""
        orders = CopyOrders(
            stored_from=np.array([slot for slot, _ in stored], np.int32),
            stored_to=np.array([slot for slot, _ in stored], np.int32),
            loaded_from=NONE,
            loaded_to=NONE,
            stored_entries=[entry(number) for _, number in stored],
            read_entries=[entry(number) for number, _ in reads],
            read_to=np.array([slot for _, slot in reads], np.int32),
        )
        self.tier.begin(orders)
        for slot, number in stored:
            self.slots[slot] = number
        self.tier.queue(orders, done)

    def next_news(self):
        return self.news.get(timeout=30)


def entry(number):
    return bytes([number]) * ENTRY_BYTES


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_a_block_is_written_and_read_into_another_slot(rig):
    rig.order(stored=[(3, 7)])
    assert rig.next_news().added == [entry(7)]
    rig.order(reads=[(7, 5)])
    news = rig.next_news()
    assert news.arrived == [entry(7)]
    assert news.read_us > 0
    assert torch.all(rig.slots[5] == 7)


def test_a_slot_that_got_other_content_is_not_written_under_the_old_name(rig):
    gate = Gate()
    rig.order(stored=[(3, 7)], done=gate)
    rig.order(stored=[(3, 8)])
    gate.end()
    assert rig.next_news().num_drops == 1
    assert rig.next_news().added == [entry(8)]
    assert list(rig.store.entries) == [entry(8)]


def test_a_read_into_a_slot_that_got_other_content_fails(rig):
    rig.order(stored=[(1, 7)])
    rig.next_news()
    gate = Gate()
    rig.order(reads=[(7, 3)], done=gate)
    rig.order(stored=[(3, 9)])
    gate.end()
    # One thread reads while another writes what the slot has now.
    both = rig.next_news(), rig.next_news()
    assert [name for news in both for name in news.failed] == [entry(7)]
    assert torch.all(rig.slots[3] == 9)


def test_a_copy_holds_up_steps_that_write_its_slot_and_no_others(rig, monkeypatch):
    rig.order(stored=[(1, 7)])
    rig.next_news()
    gate, has_begun, copy = Gate(), threading.Event(), torch.Tensor.copy_

    def slow_copy(target, *arguments):
        if threading.current_thread().name == "disk tier":
            has_begun.set()
            gate.synchronize()
        return copy(target, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", slow_copy)
        rig.order(reads=[(7, 3)])
        assert has_begun.wait(30)
        rig.order(reads=[(8, 4)])  # goes on, with no file to read
        assert rig.next_news().failed == [entry(8)]
        step = threading.Thread(target=rig.order, kwargs={"stored": [(3, 9)]})
        step.start()
        step.join(0.05)
        assert step.is_alive()
        gate.end()
        step.join(30)
        rig.next_news()
        rig.next_news()
    assert torch.all(rig.slots[3] == 9)


def test_several_blocks_are_read_at_the_same_time(rig, monkeypatch):
    rig.order(stored=[(slot, slot + 1) for slot in range(4)])
    for _ in range(4):
        rig.next_news()
    together, read = threading.Barrier(4), rig.store.read

    def read_together(*arguments):
        together.wait(30)
        read(*arguments)

    monkeypatch.setattr(rig.store, "read", read_together)
    rig.order(reads=[(slot + 1, 7 - slot) for slot in range(4)])
    arrived = {rig.next_news().arrived[0] for _ in range(4)}
    assert arrived == {entry(number) for number in range(1, 5)}
    assert [int(rig.slots[7 - slot][0]) for slot in range(4)] == [1, 2, 3, 4]


def test_a_damaged_file_is_counted_and_forgotten(rig):
    rig.order(stored=[(1, 7)])
    rig.next_news()
    [path] = rig.store.folder.rglob("*.block")
    path.write_bytes(path.read_bytes()[:-1])
    rig.order(reads=[(7, 3)])
    news = rig.next_news()
    assert news.failed == news.removed == [entry(7)]
    assert news.num_faults == 1
    assert torch.all(rig.slots[3] == 0)


def test_a_full_disk_drops_blocks_and_is_tried_again_later(rig, monkeypatch):
    def full(entry, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    write = rig.store.write
    monkeypatch.setattr(rig.store, "write", full)
    rig.order(stored=[(1, 7), (2, 8)])
    assert [rig.next_news().num_drops for _ in range(2)] == [1, 1]
    monkeypatch.setattr(rig.store, "write", write)
    rig.order(stored=[(1, 7)])
    assert rig.next_news().num_drops == 1  # too early
    rig.tier._retry_s = 0.0
    rig.order(stored=[(1, 7)])
    assert rig.next_news().added == [entry(7)]


def test_more_writes_than_can_wait_are_dropped(rig, monkeypatch):
    monkeypatch.setattr(disk_tier, "MAX_WAITING_WRITES", 2)
    gate = Gate()
    rig.order(stored=[(0, 1)], done=gate)
    rig.order(stored=[(slot, slot + 10) for slot in range(1, 8)], done=gate)
    gate.end()
    num_written = num_dropped = 0
    while num_written + num_dropped < 8:
        news = rig.next_news()
        num_written += len(news.added)
        num_dropped += news.num_drops
    assert num_written in (2, 3)  # the first may have left the queue


def test_a_block_that_has_a_file_is_not_written_again(rig):
    rig.order(stored=[(1, 7)])
    rig.next_news()
    rig.order(stored=[(2, 7)])
    news = rig.next_news()
    assert not news.added
    assert not news.num_drops
