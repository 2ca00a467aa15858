"""Calls that get a slot for a message, and calls that lose one."""

import asyncio

import pytest

from services.transport.counts import LocalCounts
from services.transport.receive_slots import ReceiveSlots
from services.transport.status import RefusedCallError

FOREVER_S = 3600.0


class Messages:
    """Messages that arrive when a test says so."""

    def __init__(self, *, max_slots: int, timeout_s: float = FOREVER_S, fair_s: float) -> None:
        self.counts = LocalCounts()
        self.begun: list[str] = []
        self._places = ReceiveSlots(
            self.counts, "receiving", max_slots=max_slots, timeout_s=timeout_s, fair_s=fair_s
        )

    async def begin(self, party: str, name: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        """Begins to receive a message; returns it and what completes it."""
        is_complete = asyncio.Event()

        async def receive() -> None:
            async with self._places.hold(party):
                self.begun.append(name)
                await is_complete.wait()

        task = asyncio.create_task(receive())
        await asyncio.sleep(0)
        return task, is_complete


async def test_a_free_slot_goes_to_the_caller_with_the_fewest():
    messages = Messages(max_slots=2, fair_s=FOREVER_S)
    first, first_done = await messages.begin("alice", "a1")
    second, second_done = await messages.begin("alice", "a2")
    third, third_done = await messages.begin("alice", "a3")
    other, other_done = await messages.begin("bob", "b1")
    assert messages.begun == ["a1", "a2"]
    for event in (first_done, other_done, second_done, third_done):
        event.set()
    await asyncio.gather(first, second, third, other)
    assert messages.begun == ["a1", "a2", "b1", "a3"]
    assert messages.counts.held("receiving") == 0


async def test_a_slow_message_of_the_greediest_caller_gives_way():
    messages = Messages(max_slots=3, fair_s=0.0)
    modest, modest_done = await messages.begin("bob", "b1")
    slowest, _ = await messages.begin("mallory", "m1")
    slow, slow_done = await messages.begin("mallory", "m2")
    newest, newest_done = await messages.begin("alice", "a1")
    with pytest.raises(RefusedCallError, match="did not arrive"):
        await slowest
    for event in (modest_done, slow_done, newest_done):
        event.set()
    await asyncio.gather(modest, slow, newest)
    assert messages.begun == ["b1", "m1", "m2", "a1"]


async def test_a_message_that_never_comes_loses_its_slot_though_no_call_waits():
    messages = Messages(max_slots=1, timeout_s=0.01, fair_s=FOREVER_S)
    task, _ = await messages.begin("alice", "a1")
    with pytest.raises(RefusedCallError, match=r"0\.01 s"):
        await task
    assert messages.counts.held("receiving") == 0


async def test_a_call_that_ends_while_it_waits_leaves_its_turn_to_the_next():
    messages = Messages(max_slots=1, fair_s=FOREVER_S)
    first, first_done = await messages.begin("alice", "a1")
    gone, _ = await messages.begin("alice", "a2")
    last, last_done = await messages.begin("alice", "a3")
    first_done.set()
    await first  # the slot is a2's now, which does not know yet
    gone.cancel()
    last_done.set()
    await last
    assert gone.cancelled() or gone.done()
    assert messages.begun[-1] == "a3"
    assert messages.counts.held("receiving") == 0
    assert messages.counts.held("receiving/alice") == 0
