"""Parties that wait for scarce work take turns."""

import asyncio

import pytest

from services.transport.fair_turns import FairTurns
from tests.support.waiting import until


class Rig:
    """Turns, and work that notes when it begins and ends on demand."""

    def __init__(self, num_turns: int = 1) -> None:
        self.turns = FairTurns(num_turns)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def ask(self, name: str) -> asyncio.Task[str]:
        """Asks for work in a turn of the party whose name is the first letter."""

        async def work() -> str:
            self.begun.append(name)
            await self.ends[name].wait()
            return name

        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self.turns.run(name[0], work))

    async def end(self, name: str) -> None:
        await until(lambda: name in self.begun)
        self.ends[name].set()


async def test_one_with_much_work_delays_another_ones_first_by_one():
    rig = Rig()
    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    tasks = [rig.ask(name) for name in names]
    for name in ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]:
        await rig.end(name)
    assert await asyncio.gather(*tasks) == names
    assert rig.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_caller_that_leaves_leaves_the_queue():
    rig = Rig()
    first, second, third = rig.ask("a1"), rig.ask("a2"), rig.ask("a3")
    await until(lambda: rig.begun == ["a1"])
    second.cancel()
    await asyncio.wait({second})
    await rig.end("a1")
    await rig.end("a3")
    assert await asyncio.gather(first, third) == ["a1", "a3"]
    assert "a2" not in rig.begun


async def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next():
    rig, loop = Rig(), asyncio.get_running_loop()
    work = loop.create_future()
    first = asyncio.create_task(rig.turns.run("z", lambda: work))
    second, third = rig.ask("a1"), rig.ask("b1")
    await asyncio.sleep(0)
    work.set_result(None)
    loop.call_soon(second.cancel)  # once it has been given the turn, and before it runs
    await rig.end("b1")
    assert await third == "b1"
    assert "a1" not in rig.begun
    await first


async def test_work_goes_on_without_its_caller_and_keeps_its_turn():
    rig = Rig()
    left, following = rig.ask("a1"), rig.ask("b1")
    await until(lambda: rig.begun == ["a1"])
    left.cancel()
    await asyncio.wait({left})
    assert rig.begun == ["a1"]
    await rig.end("a1")
    await rig.end("b1")
    assert await following == "b1"


async def test_a_turn_that_does_not_come_in_time_is_given_up():
    rig = Rig()
    first = rig.ask("a1")
    await until(lambda: rig.begun == ["a1"])
    with pytest.raises(TimeoutError):
        await rig.turns.run("b", asyncio.Event().wait, wait_s=0.01)
    assert rig.turns.num_waiting("b") == 0
    await rig.end("a1")
    assert await first == "a1"


async def test_an_error_frees_the_turn():
    turns = FairTurns(1)

    async def failing() -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await turns.run("a", failing)
