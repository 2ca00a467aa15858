"""When the load of experts is read, and when experts move."""

import asyncio

from protos.engine.v1.worker_pb2 import ExpertLayout, ExpertLoad
from services.engine.core import expert_balance
from services.engine.core.expert_balance import ExpertBalance
from services.engine.core.stats import Counters

LAYOUT = ExpertLayout(num_layers=3, num_experts=4, num_ranks=2, physical_to_logical=[0, 1, 2, 3])
UNEVEN = [90, 80, 10, 0]
EVEN = [5, 5, 5, 5]


class Channel:
    """Notes orders."""

    def __init__(self):
        self.num_reads = 0
        self.moves = []

    def read_expert_load(self):
        self.num_reads += 1

    def place_experts(self, layer, placement):
        self.moves.append((layer, tuple(placement)))


def balance(interval):
    channel, counters = Channel(), Counters()
    made = ExpertBalance(LAYOUT, channel, interval=interval, counters=counters)
    return made, channel, counters


def load(*layers):
    return ExpertLoad(counts=[count for layer in layers for count in layer])


def steps(experts, number):
    for _ in range(number):
        experts.begin_step()


def test_without_an_interval_steps_neither_read_nor_move():
    experts, channel, _ = balance(0)
    steps(experts, 1000)
    assert channel.num_reads == 0


def test_uneven_layers_move_one_a_step():
    experts, channel, counters = balance(10)
    steps(experts, 9)
    assert channel.num_reads == 0
    steps(experts, 1)
    assert channel.num_reads == 1
    experts.take(load(UNEVEN, EVEN, UNEVEN))
    assert not channel.moves
    steps(experts, 1)
    assert [layer for layer, _ in channel.moves] == [0]
    steps(experts, 2)
    assert [layer for layer, _ in channel.moves] == [0, 2]
    assert counters.num_expert_moves == 2
    assert all(sorted(placement) == [0, 1, 2, 3] for _, placement in channel.moves)


def test_a_slow_answer_is_awaited_and_not_asked_for_again():
    experts, channel, _ = balance(2)
    steps(experts, 20)
    assert channel.num_reads == 1


def test_plans_follow_the_load_since_the_last_one():
    experts, channel, _ = balance(1)
    steps(experts, 1)
    experts.take(load(UNEVEN, UNEVEN, UNEVEN))
    steps(experts, 3)
    moved = len(channel.moves)
    steps(experts, 1)
    more = [count + 7 for count in UNEVEN]
    experts.take(load(more, more, more))
    steps(experts, 3)
    assert moved == len(channel.moves) == 3


def test_a_small_gain_is_not_worth_a_move():
    experts, channel, _ = balance(1)
    steps(experts, 1)
    experts.take(load([52, 52, 50, 50], [60, 50, 50, 40], [60, 60, 40, 40]))
    steps(experts, 3)
    assert [layer for layer, _ in channel.moves] == [1, 2]


async def test_figures_are_read_on_demand():
    experts, channel, _ = balance(0)
    asking = [asyncio.create_task(experts.figures()) for _ in range(3)]
    await asyncio.sleep(0)
    assert channel.num_reads == 1
    experts.take(load(UNEVEN, EVEN, EVEN))
    for task in asking:
        assert [list(layer.expert_load) for layer in await task] == [UNEVEN, EVEN, EVEN]


async def test_a_busy_worker_gives_the_last_known_figures(monkeypatch):
    monkeypatch.setattr(expert_balance, "READ_TIMEOUT_S", 0.01)
    experts, channel, _ = balance(0)
    figures = await experts.figures()
    assert [list(layer.expert_load) for layer in figures] == [[0] * 4] * 3
    # The answer that is under way is not asked for twice, and comes to the next reader.
    again = asyncio.create_task(experts.figures())
    await asyncio.sleep(0)
    assert channel.num_reads == 1
    experts.take(load(EVEN, EVEN, UNEVEN))
    assert list((await again)[2].expert_load) == UNEVEN
