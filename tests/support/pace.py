"""When a real engine's worker runs: tests say so, not how quick the machine is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import frozen, worker_of
from tests.support.processes import ServiceProcess

PATIENCE_S = 60


async def until_live(engine: ServiceProcess, number: int) -> None:
    """Waits until the engine has so many requests."""
    async with asyncio.timeout(PATIENCE_S), engine_stub(engine.address) as stub:
        while (stats := await get_stats(stub)).num_running + stats.num_waiting != number:  # noqa: ASYNC110  as in waiting.py
            await asyncio.sleep(0.01)


async def until_aborted(engine: ServiceProcess, number: int) -> None:
    """Waits until so many of the engine's requests have been aborted."""
    async with asyncio.timeout(PATIENCE_S), engine_stub(engine.address) as stub:
        while (await get_stats(stub)).finished["aborted"] < number:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)


@asynccontextmanager
async def together(engine: ServiceProcess, number: int) -> AsyncIterator[None]:
    """Lets the worker go on once the engine has as many requests, which begin in the block."""
    with frozen(worker_of(engine)):
        yield
        await until_live(engine, number)


@asynccontextmanager
async def halted(engine: ServiceProcess) -> AsyncIterator[None]:
    """Waits until a tests.support.halting_engine's worker halts; it goes on after the block."""
    worker = worker_of(engine)
    async with asyncio.timeout(PATIENCE_S):
        while worker.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)
    try:
        yield
    finally:
        worker.resume()
