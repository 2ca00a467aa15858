"""Several processes of the frontend on the same ports: starts, watches, restarts and drains them.

This process forks the others and serves nothing. It imports no gRPC, whose threads do not survive
a fork.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import structlog

from services.frontend.config import FrontendConfig
from services.processes.child import die_with_parent
from services.processes.heartbeats import BEAT_INTERVAL_S, DIED, HUNG, Heartbeats
from services.processes.stop_signals import stop_signals
from services.telemetry.shared_figures import SharedFigures
from services.transport.shared_counts import CountTable

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
"""Waits before a process is started again: the first one, and the longest."""
STEADY_S = 60.0
"""Running time after which a process's waits begin again with the first one."""
SIGNALLED = 128
"""Exit status of a process that a signal ended, minus the signal, as shells have it."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The number of one process, and the memory that it shares with the others."""

    index: int
    counts: CountTable
    figures: SharedFigures
    beats: Heartbeats

    @property
    def is_first(self) -> bool:
        """Whether it is the one that does what only one of them can do."""
        return self.index == 0


Serve = Callable[[FrontendConfig, Share], int]
"""Serves in a new process until a signal, and returns the exit status."""


@dataclass(slots=True)
class _Member:
    """One process."""

    index: int
    pid: int | None = None
    started_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    restart_s: float | None = None
    """When it is to be started again."""
    hangs: bool = False
    """Whether it was killed because it gave no sign of life."""


class ProcessGroup:
    """The processes, from their start to their end."""

    def __init__(self, config: FrontendConfig, serve: Serve) -> None:
        """Takes the ports, so that 0 becomes the same port for all.

        Raises:
            OSError: an address cannot be listened on.
        """
        self._serve = serve
        self._ports = [_taken_port(config.host, config.port)]
        update = {"port": _port_of(self._ports[0])}
        if config.http_port is not None:
            self._ports.append(_taken_port(config.host, config.http_port))
            update["http_port"] = _port_of(self._ports[1])
        self._config = config.model_copy(update=update)
        self._counts = CountTable(config.processes)
        self._figures = SharedFigures(config.processes)
        self._beats = Heartbeats(config.processes)
        self._next_look_s = 0.0
        self._members = [_Member(index) for index in range(config.processes)]
        self._signals = {*stop_signals(), signal.SIGCHLD}
        self._is_stopping = False
        self._exit_status = 0

    def run(self) -> int:
        """Runs the processes until all have ended, and returns the exit status."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        for member in self._members:
            self._start(member)
        while any(
            member.pid is not None or member.restart_s is not None for member in self._members
        ):
            received = signal.sigtimedwait(self._signals, self._pause_s())
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._stop(signal.Signals(received.si_signo))
            self._reap()
            self._look()
            for member in self._members:
                if member.restart_s is not None and member.restart_s <= time.monotonic():
                    self._start(member)
        return self._exit_status

    def _pause_s(self) -> float:
        """Returns how long to wait for a signal at most."""
        due = [member.restart_s for member in self._members if member.restart_s is not None]
        return max(0.0, min([*due, self._next_look_s]) - time.monotonic())

    def _start(self, member: _Member) -> None:
        member.restart_s, member.started_s, member.hangs = None, time.monotonic(), False
        self._beats.begin(member.index)
        parent = os.getpid()
        member.pid = os.fork()
        if member.pid == 0:
            self._become(member.index, parent)
        log.info("process_started", index=member.index, pid=member.pid)

    def _become(self, index: int, parent: int) -> NoReturn:
        """Serves in the forked process."""
        # A terminal sends Ctrl-C to its whole process group, and the parent passes it on.
        os.setpgid(0, 0)
        die_with_parent(parent)
        for taken in self._ports:
            taken.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        structlog.contextvars.bind_contextvars(process=index)
        share = Share(index=index, counts=self._counts, figures=self._figures, beats=self._beats)
        sys.exit(self._serve(self._config, share))

    def _stop(self, number: signal.Signals) -> None:
        """Passes a signal on: at the first, processes finish their requests; at the next, end."""
        log.info("signal_received", signal=number.name)
        self._is_stopping = True
        for member in self._members:
            member.restart_s = None
            if member.pid is not None:
                os.kill(member.pid, number)

    def _look(self) -> None:
        """Kills processes that hang; they are then started again as others that died."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + BEAT_INTERVAL_S
        running = {member.index: member.pid for member in self._members if member.pid is not None}
        hung = self._beats.look(running)
        if hung is not None:
            log.error("process_hung", index=hung, pid=running[hung])
            self._members[hung].hangs = True
            os.kill(running[hung], signal.SIGKILL)

    def _reap(self) -> None:
        for member in self._members:
            if member.pid is None:
                continue
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                self._bury(member, os.waitstatus_to_exitcode(status))

    def _bury(self, member: _Member, exit_code: int) -> None:
        """Gives back what a process held, and decides whether it is started again."""
        has_served = self._figures.has_published(member.index)
        pid, member.pid = member.pid, None
        self._counts.release(member.index)
        self._figures.retire(member.index)
        self._beats.begin(member.index)
        if self._is_stopping:
            if has_served:  # one that was still starting may be ended by the first signal
                status = exit_code if exit_code >= 0 else SIGNALLED - exit_code
                self._exit_status = self._exit_status or status
            return
        log.error("process_lost", index=member.index, pid=pid, exit_code=exit_code)
        self._beats.note_loss(HUNG if member.hangs else DIED)
        if exit_code > 0 and not has_served:  # it said why, and would say so again
            self._exit_status = exit_code
            self._stop(signal.SIGTERM)
            return
        now_s = time.monotonic()
        if now_s - member.started_s > STEADY_S:
            member.backoff_s = FIRST_BACKOFF_S
        member.restart_s = now_s + member.backoff_s
        member.backoff_s = min(MAX_BACKOFF_S, 2 * member.backoff_s)


def _taken_port(host: str, port: int) -> socket.socket:
    """Returns a socket that takes a port and does not listen; others may then share it.

    Raises:
        OSError: the address cannot be used, or another program listens on it.
    """
    family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family) as alone:  # another frontend would share the port unnoticed
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        taken = socket.socket(family)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return taken


def _port_of(taken: socket.socket) -> int:
    return int(taken.getsockname()[1])
