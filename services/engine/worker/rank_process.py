"""The service's end of one worker process: starts it, talks to it, ends it. No torch here."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence

import structlog

from protos.engine.v1.worker_pb2 import WorkerEvent
from services.engine.worker.wire import WireError, framed, read_message
from services.processes.child import child_command
from services.processes.standard_error import standard_error_for_child
from services.telemetry.stacks import STACKS_SIGNAL

log = structlog.get_logger()

WORKER_MODULE = "services.engine.worker"
STOP_GRACE_S = 5.0
"""Time a worker has to end after SIGTERM before it is killed."""

_READ_AHEAD_BYTES = 2**20
_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Sent by operators, supervisors and a kernel that is short of memory; a crash sends others."""


class WorkerDiedError(Exception):
    """The worker process is gone or could not start; the message says why."""


class WorkerKilledError(WorkerDiedError):
    """Another process ended the worker; no step that it ran is suspect."""


class LostPeerError(WorkerDiedError):
    """A rank lost another one, whose own end says why."""


class NodeLostError(WorkerKilledError):
    """The host of a rank is gone, or its network is."""


def read_event(name: str, content: bytes) -> WorkerEvent:
    """Returns a rank's event, unless it is that it cannot go on.

    Args:
        name: the rank's.
        content: a serialized WorkerEvent.

    Raises:
        WorkerDiedError: the rank has failed.
    """
    event = WorkerEvent.FromString(content)
    if event.HasField("failure"):
        failure = event.failure
        where = f"in step {failure.step_id}" if failure.step_id else "while starting"
        kind = LostPeerError if failure.has_lost_peer else WorkerDiedError
        raise kind(f"{name} failed {where}: {failure.error}")
    return event


class RankProcess:
    """The worker process of one rank: `spawn`, then `send` and `next_event`, then `stop`."""

    def __init__(self, name: str) -> None:
        """Prepares a process; `name` stands for it in errors, such as "rank 1"."""
        self.name = name
        self.stage = ""
        """Its last stage while it started."""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def spawn(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], fds: Sequence[int] = ()
    ) -> None:
        """Starts the process and connects to it.

        Args:
            arguments: of the worker's command line, besides its socket.
            environment: all variables.
            fds: other descriptors that it inherits.
        """
        ours, theirs = socket.socketpair()
        with theirs, standard_error_for_child() as stderr:
            try:
                command = ["--socket-fd", str(theirs.fileno()), *arguments]
                self._process = await asyncio.create_subprocess_exec(
                    *child_command(WORKER_MODULE, command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(), *fds),
                    env=environment,
                    # Ctrl-C in the terminal reaches the service alone, also before Python has
                    # started here.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=ours, limit=_READ_AHEAD_BYTES
        )

    def send(self, command: bytes) -> None:
        """Sends a serialized command. Never blocks; `next_event` shows that a process is gone."""
        assert self._writer is not None, "commands are sent between spawn and stop"
        if not self._writer.is_closing():
            self._writer.write(framed(command))

    def interrupt(self, error: WorkerDiedError) -> None:
        """Makes `next_event` raise an error, now and later."""
        if self._reader is not None:
            self._reader.set_exception(error)

    async def next_event(self) -> WorkerEvent:
        """Returns what the process says next, unless that is its end.

        Raises:
            WorkerDiedError: it is gone.
        """
        return read_event(self.name, await self.next_message())

    async def next_message(self) -> bytes:
        """Returns the process's next event, serialized.

        The kernel closes a dead process's socket, so its end shows here at once.

        Raises:
            WorkerDiedError: it is gone.
        """
        if self._reader is None:
            raise WorkerDiedError(f"{self.name} was stopped")
        try:
            return await read_message(self._reader)
        except EOFError:
            raise await self._exit_report() from None
        except WireError as error:
            raise WorkerDiedError(f"{self.name} does not make sense: {error}") from error

    def show_stacks(self) -> None:
        """Has a process that does not answer write on standard error what its threads do."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            os.kill(pid, signal.SIGCONT)  # what was stopped handles no signal

    async def stop(self) -> None:
        """Ends the process, by force if it does not end in STOP_GRACE_S. May be called again."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError, WorkerDiedError):
                await self._writer.wait_closed()
            self._reader = self._writer = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            await _end(process)

    async def _exit_report(self) -> WorkerDiedError:
        """Says how a process ended that has hung up."""
        process = self._process
        if process is None:
            return WorkerDiedError(f"{self.name} was stopped")
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                code = await process.wait()
        except TimeoutError:
            return WorkerDiedError(f"{self.name} hung up but still runs")
        if code >= 0:
            return WorkerDiedError(f"{self.name} exited with code {code}")
        number = signal.Signals(-code)
        kind = WorkerKilledError if number in _OUTSIDE_SIGNALS else WorkerDiedError
        return kind(f"{self.name} was killed by {number.name}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a process, by force if it does not end in STOP_GRACE_S."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        log.warning("worker_killed", worker_pid=process.pid, grace_s=STOP_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
