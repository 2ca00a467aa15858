"""Resources that services hold, seen from outside: every fault must give them back."""

import asyncio
import contextlib
import os
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import psutil

from protos.engine.v1.engine_pb2 import GetStatsResponse
from tests.support.engine_client import engine_stub, get_stats
from tests.support.processes import ServiceProcess

SETTLE_S = 30.0
GRAMMARS = "services.engine.grammar.probe"


class Process(Protocol):
    """A running process of a test."""

    @property
    def pid(self) -> int:
        """Its id."""


def worker_of(engine: ServiceProcess) -> psutil.Process:
    """Returns the engine's worker process.

    A worker may have processes of its own, and one that was replaced may not be reaped yet. The
    engine may have a process for grammars, of a test before that shares it.
    """
    others = {each.pid: each for each in children(engine)}
    (worker,) = [each for each in others.values() if _is_first(each, others)]
    return worker


def _is_first(process: psutil.Process, others: Container[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        is_worker = process.status() != psutil.STATUS_ZOMBIE and GRAMMARS not in process.cmdline()
        return is_worker and process.ppid() not in others
    return False


def children(service: Process) -> list[psutil.Process]:
    """Returns a service's other processes.

    They are its descendants, in sessions of their own, and forked ones in the group that it leads.
    """
    # psutil.process_iter remembers processes by their ids, which others have got since.
    forked = processes_of(pid for pid in psutil.pids() if _group_of(pid) == service.pid)
    try:
        own = psutil.Process(service.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        own = []
    return [each for each in {*forked, *own} if each.pid != service.pid]


def processes_of(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yields those of some processes that have not ended."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@dataclass(frozen=True)
class Held:
    """Resources that an engine holds for requests and frontends."""

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


async def assert_all_is_given_back(engine: ServiceProcess, baseline: Held) -> None:
    """Waits until the engine holds what it did when nothing was asked of it."""
    end_s = time.monotonic() + SETTLE_S
    while (held := await held_by(engine)).exceeds(baseline) and time.monotonic() < end_s:  # noqa: ASYNC110  as in waiting.py
        await asyncio.sleep(0.05)
    assert not held.exceeds(baseline), (held, baseline)
