"""Histograms show how an event loop gets on."""

import asyncio
import itertools
import time

from services.telemetry.loop_lag import TICK_S, LoopLag
from tests.support.loop_time import LoopTime
from tests.support.waiting import until


async def test_time_that_passes_beside_the_loop_is_a_wait():
    clock, lag = LoopTime(), LoopLag()
    watching = asyncio.create_task(lag.watch())
    await until(lambda: sum(lag.waits.counts) > 0)
    clock.wind(100)
    await until(lambda: lag.waits.counts[-1] > 0)
    watching.cancel()
    assert lag.waits.sum >= 100 - TICK_S


async def test_cpu_of_the_loops_thread_is_reported(monkeypatch):
    seconds = itertools.count(step=3)
    lag = LoopLag()
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    watching = asyncio.create_task(lag.watch())
    await until(lambda: sum(lag.cpu.counts) > 1)
    watching.cancel()
    assert lag.cpu.sum == 3 * sum(lag.cpu.counts)
