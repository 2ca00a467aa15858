"""Workers and services that are forked from a process that has imported torch, not started.

They are processes of their own with the command line, the environment and the descriptors that the
engine, or `octavo serve`, gives them.
"""

import asyncio
import contextlib
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from services.processes.child import child_command, python_command
from tests.support import odd_rank
from tests.support.forks import OF_SERVICES, fork, fork_server

MODULES = (
    "services.engine",
    "services.engine.worker",
    "services.frontend",
    "tests.support.steered_engine",
    odd_rank.MODULE,
)


class ForkedProcess:
    """The part of asyncio's processes that engines use."""

    def __init__(self, pid: int, report: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.pid = pid
        self.returncode: int | None = None
        self._writer = writer
        self._ended = asyncio.create_task(self._await_end(report))

    async def wait(self) -> int:
        """Returns how the process ended, when it has."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Asks it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    async def _await_end(self, report: asyncio.StreamReader) -> int:
        self.returncode = int(await report.readline())
        self._writer.close()
        return self.returncode


@contextlib.contextmanager
def workers_forked(server: socket.socket | None = None) -> Iterator[None]:
    """Forks the workers and services that this process starts, for the length of the block.

    server: the connection to a fork server; by default this process's own.
    """
    start = asyncio.create_subprocess_exec
    prefix = child_command("")[:-1]

    async def fork_or_start(*command, **options):
        module = command[len(prefix)] if list(command[: len(prefix)]) == prefix else None
        if module not in MODULES:
            return await start(*command, **options)
        return await _fork(server or fork_server(*OF_SERVICES), command[len(prefix) :], **options)

    asyncio.create_subprocess_exec = fork_or_start
    try:
        yield
    finally:
        asyncio.create_subprocess_exec = start


async def _fork(
    server, command, *, stdin, env, start_new_session, stdout=None, stderr=None, pass_fds=()
) -> ForkedProcess:
    assert stdin == asyncio.subprocess.DEVNULL
    assert start_new_session  # a forked one stays in our group, whose end tests order
    with Path(os.devnull).open("rb") as nothing:  # noqa: ASYNC230  never waits
        descriptors = {
            0: nothing.fileno(),
            1: _descriptor(stdout, 1),
            2: _descriptor(stderr, 2),
            **{fd: fd for fd in pass_fds},
        }
        ours = fork(server, command, environment=env, descriptors=descriptors, group=os.getpgrp())
    report, writer = await asyncio.open_unix_connection(sock=ours)
    return ForkedProcess(int(await report.readline()), report, writer)


def _descriptor(stream, inherited: int) -> int:
    if stream is None:
        return inherited
    return stream if isinstance(stream, int) else stream.fileno()


@contextlib.contextmanager
def services_become_us() -> Iterator[None]:
    """Runs the service that this process would become, for the length of the block.

    It has imported what a new process would import again.
    """
    become, prefix = os.execv, python_command("")[:-1]

    def run_or_become(path, command):
        if list(command[: len(prefix)]) != prefix:
            become(path, command)
        sys.argv = list(command[len(prefix) :])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.exit()

    os.execv = run_or_become
    try:
        yield
    finally:
        os.execv = become
