"""A process that has imported modules, and forks programs without that cost.

python -m tests.support.fork_server SOCKET_FD [MODULE,...]

A request is JSON, with the descriptors that the program inherits. A keeper, a fork of its own,
reports the program's id and how it ended, as lines, to the first descriptor. An engine asks for its
workers over a connection that this process has made.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from services.processes.child import die_with_parent
from tests.support.forked_workers import services_become_us, workers_forked

_MAX_BYTES, _MAX_FDS = 2**17, 32


def main() -> None:
    """Forks a program for each request, until the process that asks is gone."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in filter(None, sys.argv[2].split(",")):
        import_module(module)
    of_programs, for_programs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Forks share the memory of what no collection touches.
    gc.freeze()
    while received := _received(requests, of_programs):
        request, fds = received
        own_id = os.getpid()
        if not os.fork():
            requests.close()
            of_programs.close()
            _keep(own_id, request, fds, for_programs)
            return
        for fd in fds:
            os.close(fd)
        _forget_ended_keepers()


def _forget_ended_keepers() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _received(*connections: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    ready, _, _ = select.select(connections, [], [])
    content, messages, _, _ = ready[0].recvmsg(_MAX_BYTES, socket.CMSG_SPACE(4 * _MAX_FDS))
    if not content:
        return None
    fds = array.array("i")
    for _, _, each in messages:
        fds.frombytes(each)
    return json.loads(content), fds.tolist()


def _keep(
    server_id: int, request: dict[str, Any], fds: list[int], for_programs: socket.socket
) -> None:
    """Reports on the program in one process; in another, becomes the program."""
    die_with_parent(server_id)
    report, *inherited = fds
    own_id = os.getpid()
    program_id = os.fork()
    if not program_id:
        os.close(report)
        os.setpgid(0, request["group"])  # here and below, as either process may come first
        try:
            _run(own_id, request, [for_programs.detach(), *inherited])
        except SystemExit as error:
            if not isinstance(error.code, int | None):
                raise
            _end(error.code or 0)
        _end(0)
    for fd in inherited:
        os.close(fd)
    for_programs.close()
    os.setpgid(program_id, request["group"] or program_id)
    os.write(report, b"%d\n" % program_id)
    _kill_once_closed(report, program_id)
    _, status = os.waitpid(program_id, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _kill_once_closed(report: int, program_id: int) -> None:
    """Returns when the program has ended, by force if the process that asked for it is gone."""
    program = os.pidfd_open(program_id)
    ready, _, _ = select.select([report, program], [], [])
    if program not in ready:
        os.kill(program_id, signal.SIGKILL)


def _run(keeper_id: int, request: dict[str, Any], fds: list[int]) -> None:
    """Becomes the program: its descriptors, after the server's, have the numbers it expects."""
    die_with_parent(keeper_id)
    # Out of the way of the numbers, some of which others of these may have.
    free = max(request["numbers"]) + 1
    server, *moved = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in fds)
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, request["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *arguments = request["command"]
    if module == "-c":
        _run_text(*arguments)
        return
    sys.argv = [module, *arguments]
    with workers_forked(socket.socket(fileno=server)), services_become_us():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end(returncode: int) -> NoReturn:
    """Ends the program as Python does, except that it frees no objects.

    To free them is to copy all pages of memory that forks share.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(returncode)


def _run_text(program: str, *arguments: str) -> None:
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    exec(compile(program, "<program>", "exec"), vars(main_module))


if __name__ == "__main__":
    main()
