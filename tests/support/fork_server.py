"""A process that has imported the modules of workers, and forks workers without that cost.

python -m tests.support.fork_server SOCKET_FD

A request is JSON, with the descriptors that the program inherits. A keeper, a fork of its own,
reports the program's id and how it ended, as lines, to the first descriptor.
"""

import array
import contextlib
import fcntl
import gc
import json
import os
import runpy
import socket
import sys
from typing import Any

# These take a worker seconds to import, torch above all.
import services.engine.worker.process
import services.engine.worker.start.startup  # noqa: F401
from services.processes.parent_death import die_with_parent

_MAX_BYTES, _MAX_FDS = 2**17, 32


def main() -> None:
    """Forks a program for each request, until the process that asks is gone."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    # Forks share the memory of what no collection touches.
    gc.freeze()
    while received := _received(requests):
        request, fds = received
        own_id = os.getpid()
        if not os.fork():
            requests.close()
            _keep(own_id, request, fds)
            return
        for fd in fds:
            os.close(fd)
        _forget_ended_keepers()


def _forget_ended_keepers() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _received(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    content, messages, _, _ = requests.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(4 * _MAX_FDS))
    if not content:
        return None
    fds = array.array("i")
    for _, _, each in messages:
        fds.frombytes(each)
    return json.loads(content), fds.tolist()


def _keep(server_id: int, request: dict[str, Any], fds: list[int]) -> None:
    """Reports on the program in one process; in another, becomes the program."""
    die_with_parent(server_id)
    report, *inherited = fds
    own_id = os.getpid()
    program_id = os.fork()
    if not program_id:
        os.close(report)
        _run(own_id, request, inherited)
        return
    for fd in inherited:
        os.close(fd)
    os.write(report, b"%d\n" % program_id)
    _, status = os.waitpid(program_id, 0)
    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(keeper_id: int, request: dict[str, Any], fds: list[int]) -> None:
    """Becomes the program: its descriptors have the numbers that it expects."""
    die_with_parent(keeper_id)
    # Out of the way of the numbers, some of which others of these may have.
    free = max(request["numbers"]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, request["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *arguments = request["command"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
