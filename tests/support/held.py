"""What services hold, looked at from outside: it must be given back after every fault."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import psutil

from protos.engine.v1.engine_pb2 import GetStatsResponse
from tests.support.engine_client import engine_stub, get_stats
from tests.support.processes import ServiceProcess
from tests.support.waiting import until

SETTLE_S = 30.0


def worker_of(engine: ServiceProcess) -> psutil.Process:
    """Returns the engine's worker process."""
    (worker,) = psutil.Process(engine.pid).children()
    return worker


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


def has_stopped(engine: ServiceProcess) -> bool:
    """Whether the engine's worker is stopped now."""
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(engine.pid).children()
        return any(worker.status() == psutil.STATUS_STOPPED for worker in workers)
    return False


@asynccontextmanager
async def stopped(engine: ServiceProcess) -> AsyncIterator[psutil.Process]:
    """Waits until the worker has stopped by itself, and lets it run on when the block ends.

    The engine is a tests.support.mortal_engine that was told to `stop_after` some token.
    """
    await until(lambda: has_stopped(engine))
    worker = worker_of(engine)
    try:
        yield worker
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


@dataclass(frozen=True)
class Held:
    """What an engine holds for requests and frontends."""

    num_live: int
    num_used_blocks: int
    num_sessions: int
    num_tasks: int

    @classmethod
    def of(cls, stats: GetStatsResponse) -> "Held":
        """Reads it from the engine's figures."""
        return cls(
            num_live=stats.num_running + stats.num_waiting,
            num_used_blocks=stats.num_blocks - 1 - stats.num_free_blocks,
            num_sessions=stats.num_sessions,
            num_tasks=stats.num_tasks,
        )

    def exceeds(self, other: "Held") -> bool:
        """Whether more is held of anything that is to be given back."""
        return (
            (self.num_live, self.num_used_blocks) != (0, 0)
            or self.num_sessions > other.num_sessions
            or self.num_tasks > other.num_tasks
        )


async def held_by(engine: ServiceProcess) -> Held:
    """Returns what an engine holds now, asked for over a connection of its own."""
    async with engine_stub(engine.address) as stub:
        return Held.of(await get_stats(stub))


async def until_live(engine: ServiceProcess, number: int) -> None:
    """Waits until the engine has so many requests."""
    async with asyncio.timeout(60):
        while (await held_by(engine)).num_live != number:  # noqa: ASYNC110  as in waiting.py
            await asyncio.sleep(0.01)


async def assert_all_is_given_back(engine: ServiceProcess, baseline: Held) -> None:
    """Waits until the engine holds what it did when nothing was asked of it."""
    end_s = time.monotonic() + SETTLE_S
    while (held := await held_by(engine)).exceeds(baseline) and time.monotonic() < end_s:  # noqa: ASYNC110  as in waiting.py
        await asyncio.sleep(0.05)
    assert not held.exceeds(baseline), (held, baseline)
