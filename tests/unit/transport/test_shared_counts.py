"""Counts that several processes share."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.transport import shared_counts
from services.transport.counts import Rate
from services.transport.shared_counts import CountTable, SharedCounts

ROOT = Path(__file__).resolve().parents[3]
SIXTY = Rate(per_s=1, capacity=60)
RACE = """
import os
from services.transport.counts import Rate
from services.transport.shared_counts import CountTable, SharedCounts

table = CountTable(4)
children = []
for process in range(4):
    pid = os.fork()
    if pid == 0:
        counts = SharedCounts(table, process, clock=lambda: 1.0)
        for _ in range(500):
            counts.take("places", limit=1234)
            counts.take("held a moment", limit=None)
            counts.give_back("held a moment")
            counts.draw("tokens", 1, rate=Rate(per_s=1, capacity=3000), needs=None)
        os._exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
counts = SharedCounts(table, 0, clock=lambda: 1.0)
rate = Rate(per_s=1, capacity=3000)
print(counts.held("places"), counts.held("held a moment"),
      counts.draw("tokens", 0, rate=rate, needs=3000))
for process in range(4):
    table.release(process)
print(counts.held("places"))
"""


def test_processes_that_count_at_the_same_time_keep_to_one_limit():
    told = subprocess.run(
        [sys.executable, "-c", RACE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["1234", "0", "2000.0", "0"]


def test_a_limit_holds_over_all_and_each_gives_back_its_own():
    table = CountTable(2)
    one, other = SharedCounts(table, 0), SharedCounts(table, 1)
    assert one.take("places", 2, limit=3)
    assert not other.take("places", 2, limit=3)
    assert other.take("places", limit=3)
    assert one.held("places") == other.held("places") == 3
    with pytest.raises(AssertionError, match="more was given back"):
        other.give_back("places", 2)
    one.give_back("places", 2)
    assert other.held("places") == 1


def test_what_a_dead_process_held_is_released_and_its_tokens_stay_drawn():
    table = CountTable(2)
    one, other = (SharedCounts(table, index, clock=lambda: 1.0) for index in range(2))
    assert one.take("places", 3, limit=3)
    assert other.take("other", 1, limit=3)
    assert one.draw("tokens", 60, rate=SIXTY, needs=60) == 0
    table.release(0)
    assert (other.held("places"), other.held("other")) == (0, 1)
    assert other.draw("tokens", 1, rate=SIXTY, needs=1) == 1


def test_names_that_are_no_longer_used_make_room(monkeypatch):
    monkeypatch.setattr(shared_counts, "NUM_BUCKETS", 1)
    now_s = 0.0
    table = CountTable(1)
    counts = SharedCounts(table, 0, clock=lambda: now_s)
    for index in range(200):
        assert counts.take(f"connections/{index}", limit=1)
        counts.give_back(f"connections/{index}")
    for index in range(31):
        assert counts.draw(f"tokens/{index}", 60, rate=SIXTY, needs=60) == 0
    assert counts.take("held", limit=1)
    with pytest.raises(RuntimeError, match="32 names"):
        counts.take("one more", limit=1)
    now_s = 61.0
    assert counts.take("one more", limit=1)
    assert counts.held("held") == 1
    assert counts.draw("tokens/3", 60, rate=SIXTY, needs=60) == 0
