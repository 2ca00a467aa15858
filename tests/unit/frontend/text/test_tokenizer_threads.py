"""Long texts hold up neither short ones nor callers that left."""

import asyncio
import threading

import pytest

from services.frontend.errors import OverloadedError
from services.frontend.text.tokenizer_threads import (
    LONG_CHARACTERS,
    MAX_LONG_TEXTS,
    TokenizerThreads,
)
from tests.support.waiting import until

LONG = LONG_CHARACTERS + 1


@pytest.fixture
def held():
    """Threads with a long text at work in each that takes long ones, and what ends it."""
    threads, gate = TokenizerThreads(2), threading.Event()
    yield threads, gate
    gate.set()
    threads.close()


async def test_short_texts_do_not_wait_for_long_ones(held):
    threads, gate = held
    long = [asyncio.create_task(threads.run(LONG, gate.wait)) for _ in range(5)]
    results = [await threads.run(LONG_CHARACTERS, lambda: "short") for _ in range(5)]
    assert results == ["short"] * 5
    gate.set()
    assert await asyncio.gather(*long) == [True] * 5


async def test_waiting_long_texts_are_limited(held):
    threads, gate = held
    long = [asyncio.create_task(threads.run(LONG, gate.wait)) for _ in range(MAX_LONG_TEXTS)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="64 long texts wait") as refusal:
        await threads.run(LONG, gate.wait)
    assert refusal.value.retry_after_ms is not None
    gate.set()
    await asyncio.gather(*long)
    assert await threads.run(LONG, lambda: "taken again") == "taken again"


async def test_a_caller_that_leaves_leaves_the_queue(held):
    threads, gate = held
    began = threading.Event()

    def work():
        began.set()
        gate.wait()

    running = asyncio.create_task(threads.run(LONG, work))
    await until(began.is_set)
    waiting = [asyncio.create_task(threads.run(LONG, gate.wait)) for _ in range(MAX_LONG_TEXTS - 1)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    last = asyncio.create_task(threads.run(LONG, lambda: "last"))
    gate.set()
    await running
    assert await last == "last"


async def test_work_goes_on_without_its_caller_and_keeps_its_thread(held):
    threads, gate = held
    began = threading.Event()

    def work():
        began.set()
        gate.wait()

    left = asyncio.create_task(threads.run(LONG, work))
    await until(began.is_set)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    is_next_at_work = threading.Event()
    following = asyncio.create_task(threads.run(LONG, is_next_at_work.set))
    await threads.run(1, lambda: None)
    assert not is_next_at_work.is_set()
    gate.set()
    await following


async def test_an_error_frees_the_thread(held):
    threads, _ = held
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await threads.run(LONG, lambda: 1 / 0)
    assert await threads.run(LONG, lambda: "still there") == "still there"
