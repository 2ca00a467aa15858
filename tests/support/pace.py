"""Stops and continues a real engine's worker, so that tests do not depend on speed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import psutil

from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import children, held_by, worker_of
from tests.support.processes import ServiceProcess
from tests.support.waiting import until

LONG_TIMEOUT_S = 60


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Keeps a process from running inside the block."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@asynccontextmanager
async def together(engine: ServiceProcess, number: int) -> AsyncIterator[None]:
    """Lets the worker go on once the engine has as many requests, which begin in the block."""
    with frozen(worker_of(engine)):
        yield
        await until_live(engine, number)


def has_stopped(engine: ServiceProcess) -> bool:
    """Whether the engine's worker is stopped now."""
    with suppress(psutil.NoSuchProcess):
        return any(each.status() == psutil.STATUS_STOPPED for each in children(engine))
    return False


@asynccontextmanager
async def stopped(engine: ServiceProcess) -> AsyncIterator[psutil.Process]:
    """Waits until the worker has stopped by itself, and lets it run on when the block ends.

    The engine is a tests.support.steered_engine started with `stop_after` some token.
    """
    # A look at all processes takes as long as dozens of tokens.
    await until(lambda: has_stopped(engine), pause_s=0.05)
    worker = worker_of(engine)
    try:
        yield worker
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


async def until_live(engine: ServiceProcess, number: int) -> None:
    """Waits until the engine has `number` live requests."""
    async with asyncio.timeout(LONG_TIMEOUT_S):
        while (await held_by(engine)).num_live != number:  # noqa: ASYNC110  as in waiting.py
            await asyncio.sleep(0.01)


async def until_aborted(engine: ServiceProcess, number: int) -> None:
    """Waits until `number` of the engine's requests have been aborted."""
    async with asyncio.timeout(LONG_TIMEOUT_S), engine_stub(engine.address) as stub:
        while (await get_stats(stub)).finished["aborted"] < number:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)
