"""Processes that build kernels for this one, each on a processor of its own.

Python's lock keeps the threads of one process from building kernels at the same time. A process
whose threads use CUDA cannot be forked, and a new one takes seconds to import torch. So a worker
forks one child, the template, before it has such threads, and the template forks the builders when
there is something to build. None of them touches CUDA.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from services.engine.worker.parent_death import die_with_parent

MAX_PROCESSES = 16
BUILD_TIMEOUT_S = 120.0
"""Longest time for all builds of one order; then whoever wants them builds for itself."""

_STANDARD_FDS = 3


class Build(Protocol):
    """Something to build that can be pickled; models.ops.triton.kernel_builds.KernelBuild."""

    def build(self) -> None:
        """Builds it to where it will be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What became of an order.

    error: the first one's; empty if nothing failed.
    """

    num_built: int
    num_failed: int
    num_processes: int
    error: str = ""


class BuildProcesses:
    """Builders in waiting; `fork`, then `begin` and `wait` in turns, then `stop`."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self._pid = pid
        self._connection = connection
        self._num_ordered = 0

    @classmethod
    def fork(cls, prepare: Callable[[], None]) -> "BuildProcesses":
        """Forks the template. This process must have no other threads of Python's.

        Args:
            prepare: what the template does first, so that no builder has to.
        """
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, ours)
        try:
            die_with_parent()
            _close_all_but(theirs.fileno())
            prepare()
            _serve(theirs)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(1)  # nothing of the worker's is to be cleaned up here

    def begin(self, builds: Sequence[Build], *, niceness: int = 0) -> None:
        """Orders builds, the first ones to be begun first. `wait` ends the order.

        Args:
            builds: at least one.
            niceness: how far their processes stand back behind others.
        """
        self._num_ordered = len(builds)
        try:
            self._connection.send((list(builds), niceness))
        except OSError:
            self.stop()

    def wait(self) -> BuildReport:
        """Waits for all that was ordered. What was not built is to be built by whoever wants it."""
        error = "the processes that build are gone"
        try:
            if self._connection.poll(BUILD_TIMEOUT_S):
                report: BuildReport = self._connection.recv()
                return report
            error = f"they took longer than {BUILD_TIMEOUT_S} s"
        except (EOFError, OSError):
            pass
        self.stop()
        return BuildReport(num_built=0, num_failed=self._num_ordered, num_processes=0, error=error)

    def stop(self) -> None:
        """Ends the processes, whatever they are doing. May be called again."""
        if self._connection.closed:
            return
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)  # its builders follow
        os.waitpid(self._pid, 0)


def _serve(connection: Connection) -> None:
    """Builds what is ordered until nobody can order any more."""
    while True:
        try:
            builds, niceness = connection.recv()
        except EOFError:
            return
        connection.send(_build_all(builds, niceness))


def _build_all(builds: Sequence[Build], niceness: int) -> BuildReport:
    """Builds in processes that are forked for it; a builder that dies takes the rest with it."""
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(builds))
    with ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin_builder,
        initargs=(niceness,),
    ) as processes:
        futures = []
        with suppress(BrokenProcessPool):  # the futures say so too
            for build in builds:
                futures.append(processes.submit(_build, build))
        errors = [future.exception() for future in futures]
    num_built = errors.count(None)
    return BuildReport(
        num_built=num_built,
        num_failed=len(builds) - num_built,
        num_processes=num_processes,
        error=next((repr(error) for error in errors if error is not None), ""),
    )


def _begin_builder(niceness: int) -> None:
    die_with_parent()
    os.nice(niceness)


def _build(build: Build) -> None:
    build.build()


def _close_all_but(fd: int) -> None:
    """Closes what was inherited: a socket that a child holds does not show its owner's death."""
    os.closerange(_STANDARD_FDS, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
