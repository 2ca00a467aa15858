"""Texts of one account do not hold up those of another."""

import asyncio
import threading

import pytest

from services.frontend.errors import OverloadedError
from services.frontend.text.tokenizer_threads import TokenizerThreads
from tests.support.waiting import until


async def test_another_accounts_text_is_next_however_many_one_has_sent():
    threads, gate, done = TokenizerThreads(1), threading.Event(), []
    work = [
        asyncio.create_task(threads.run("mallory", lambda: done.append(gate.wait())))
        for _ in range(20)
    ]
    await asyncio.sleep(0)
    honest = asyncio.create_task(threads.run("bob", lambda: len(done)))
    await asyncio.sleep(0)
    gate.set()
    assert await honest <= 2
    await asyncio.gather(*work)
    threads.close()


async def test_work_goes_on_without_its_caller_and_keeps_its_thread():
    threads, gate, began = TokenizerThreads(1), threading.Event(), threading.Event()

    def work():
        began.set()
        gate.wait()

    left = asyncio.create_task(threads.run("a", work))
    await until(began.is_set)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    is_next_at_work = threading.Event()
    following = asyncio.create_task(threads.run("b", is_next_at_work.set))
    await asyncio.sleep(0)
    assert not is_next_at_work.is_set()
    gate.set()
    await following
    threads.close()


async def test_work_that_is_refused_when_its_turn_comes_is_not_done():
    threads, done = TokenizerThreads(1), []

    def refuse():
        raise OverloadedError("used up", retry_after_ms=None)

    with pytest.raises(OverloadedError):
        await threads.run("a", lambda: done.append("a"), check=refuse)
    await threads.run("b", lambda: done.append("b"))
    assert done == ["b"]
    threads.close()
