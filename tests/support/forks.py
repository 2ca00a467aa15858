"""Asks this process's fork servers for programs; see tests/support/fork_server.py."""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "tests.support.fork_server"
OF_SERVICES = (
    "services.client.cli",
    "services.engine.server",
    "services.engine.worker.executor",
    "services.engine.worker.process",
    "services.engine.worker.start.startup",
    "services.frontend.server",
    "torch._inductor",
)
"""Modules of services, of workers that compile and of commands; torch's take seconds to import."""


def fork(
    server: socket.socket,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
    group: int,
) -> socket.socket:
    """Asks for a program, which is killed when the returned socket is closed.

    Args:
        server: the fork server's connection.
        command: a module and its arguments, or "-c", a program and its arguments.
        environment: all variables.
        descriptors: of this process, by the number that the program has for them.
        group: of processes that it joins; 0 is a new one, with the program's id.

    Returns:
        A socket with two lines: the program's id, and later how it ended, as Popen.returncode.
    """
    ours, theirs = socket.socketpair()
    request = {
        "command": list(command),
        "environment": dict(environment),
        "numbers": list(descriptors),
        "group": group,
    }
    with theirs:
        fds = [theirs.fileno(), *descriptors.values()]
        socket.send_fds(server, [json.dumps(request).encode()], fds)
    return ours


_BASE = ("torch",)
_FORKS_OF_BASE = (OF_SERVICES, ("tests.support.kernel_compiler",))
"""Modules of servers that need torch as well, which are forks of the one that has it."""


@cache
def fork_server(*modules: str) -> socket.socket:
    """Starts this process's server with some modules, which ends when the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Tests look for processes that have a module among their arguments.
    arguments = [str(theirs.fileno()), ",".join(modules)]
    # gRPC reads these when it is imported; services set them.
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}
    with theirs:
        if modules in _FORKS_OF_BASE:
            descriptors = {number: number for number in (0, 1, 2, theirs.fileno())}
            command = [_MODULE, *arguments]
            report = fork(
                fork_server(*_BASE), command, environment=environment, descriptors=descriptors,
                group=os.getpgrp(),
            )  # fmt: skip
            # It lives as long as this is open.
            atexit.register(report.close)
        else:
            server = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *arguments],
                cwd=_ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
            atexit.register(server.wait)
    atexit.register(ours.close)
    return ours
