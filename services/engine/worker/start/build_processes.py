"""Processes that build kernels for this one, one per processor.

Python's lock keeps threads of one process from building in parallel. A process whose threads use
CUDA cannot be forked, and a new one takes seconds to import torch. So a worker forks one child, the
template, before it has such threads, and the template forks the builders. None of them uses CUDA.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Protocol

from services.processes.child import die_with_parent

MAX_PROCESSES = 16
BACKGROUND_NICENESS = 10
"""Niceness of builds while a worker serves."""
BUILD_TIMEOUT_S = 120.0
"""Time limit for the builds of one order; then the caller builds them itself."""

_STANDARD_FDS = 3


class Build(Protocol):
    """A picklable build, such as a `KernelBuild` of a Triton kernel."""

    def build(self) -> None:
        """Stores the result where it will be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """The outcome of some builds.

    error: the first one; empty if none failed.
    """

    num_built: int
    num_failed: int
    error: str = ""


class BuildProcesses:
    """Processes that build: `fork`, then `begin` and `wait` any number of times, then `stop`."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self._pid = pid
        self._connection = connection
        self._num_ordered = 0
        self._errors: dict[int, str] = {}

    @classmethod
    def fork(cls, prepare: Callable[[], None]) -> "BuildProcesses":
        """Forks the template; this process must have no other Python threads.

        Args:
            prepare: run first by the template, so that no builder has to.
        """
        ours, theirs = multiprocessing.Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, ours)
        try:
            die_with_parent(parent)
            _close_all_but(theirs.fileno())
            prepare()
            _serve(theirs)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(1)  # skips the worker's cleanup

    def begin(self, builds: Sequence[Build], *, niceness: int = 0) -> range:
        """Orders builds, which start in this order after all earlier ones have started.

        Args:
            builds: at least one.
            niceness: of their processes.

        Returns:
            Their numbers, for `wait`.
        """
        numbers = range(self._num_ordered, self._num_ordered + len(builds))
        self._num_ordered = numbers.stop
        try:
            self._connection.send((numbers.start, list(builds), niceness))
        except OSError:
            self.stop()
        return numbers

    def wait(self, numbers: Collection[int]) -> BuildReport:
        """Waits for builds; the caller builds missing ones itself.

        Args:
            numbers: of the builds; others may still run afterwards.
        """
        until_s = time.monotonic() + BUILD_TIMEOUT_S
        trouble = ""
        while not trouble and not self._errors.keys() >= set(numbers):
            try:
                if self._connection.poll(max(0.0, until_s - time.monotonic())):
                    number, error = self._connection.recv()
                    self._errors[number] = error
                else:
                    trouble = f"they took longer than {BUILD_TIMEOUT_S} s"
            except (EOFError, OSError):
                trouble = "the processes that build are gone"
        if trouble:
            self.stop()
        errors = [error for number in numbers if (error := self._errors.get(number, trouble))]
        return BuildReport(
            num_built=len(numbers) - len(errors),
            num_failed=len(errors),
            error=errors[0] if errors else "",
        )

    def stop(self) -> None:
        """Kills the processes; may be called again."""
        if self._connection.closed:
            return
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)  # its builders die with it
        os.waitpid(self._pid, 0)


def num_processes(num_builds: int) -> int:
    """Returns the number of processes for `num_builds` builds."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES, num_builds)


@dataclass(frozen=True, slots=True)
class _Ordered:
    number: int
    build: Build
    niceness: int


def _serve(connection: Connection) -> None:
    """Builds in the order of requests, each in its own process, and reports; ends with them."""
    waiting: deque[_Ordered] = deque()
    running: dict[Connection, int] = {}
    while True:
        for ready in wait([connection, *running]):
            assert isinstance(ready, Connection), "nothing else was given"
            if ready is not connection:
                connection.send((running.pop(ready), _outcome(ready)))
                continue
            try:
                first, builds, niceness = connection.recv()
            except EOFError:
                return
            waiting.extend(
                _Ordered(number, build, niceness) for number, build in enumerate(builds, first)
            )
        while waiting and len(running) < num_processes(len(waiting) + len(running)):
            ordered = waiting.popleft()
            running[_fork_builder(ordered.build, ordered.niceness)] = ordered.number


def _fork_builder(build: Build, niceness: int) -> Connection:
    """Starts a build in another process, which sends its error."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    try:
        die_with_parent(parent)
        os.nice(niceness)
        build.build()
    finally:
        error = sys.exc_info()[1]
        theirs.send("" if error is None else repr(error))
        os._exit(0)


def _outcome(connection: Connection) -> str:
    """Returns the error of a finished builder."""
    with connection:
        try:
            error: str = connection.recv()
        except EOFError:
            error = "its process died"
    os.wait()
    return error


def _close_all_but(fd: int) -> None:
    """Closes inherited descriptors: a socket held by a child would hide its owner's death."""
    os.closerange(_STANDARD_FDS, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
