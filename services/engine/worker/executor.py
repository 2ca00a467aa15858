"""The service's end of a worker process: starts it, orders steps, takes results. No torch here."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import structlog

from protos.engine.v1.worker_pb2 import (
    CompileReport,
    GraphReport,
    ProfileReport,
    ProfileStart,
    ProfileStarted,
    ProfileStop,
    Recompilation,
    WorkerCommand,
    WorkerEvent,
    WorkerReady,
)
from services.engine.batch import BatchDescriptor, StepResult
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.wire import WireError, framed, read_message
from services.processes.child import child_command
from services.processes.standard_error import standard_error_for_child
from services.telemetry.stacks import STACKS_SIGNAL

log = structlog.get_logger()

WORKER_MODULE = "services.engine.worker"
STOP_GRACE_S = 5.0
"""Time a worker has to end after SIGTERM before it is killed."""
STACKS_GRACE_S = 0.5
"""Time a worker has to show its stacks before it is ended."""

_IMPORT_ROOT = Path(__file__).resolve().parents[3]
_READ_AHEAD_BYTES = 2**20


ProfileAnswer = Callable[[ProfileStarted | ProfileReport], None]
"""Takes a worker's word that a profile has begun or ended."""


class WorkerDiedError(Exception):
    """The worker process is gone or could not start; the message says why."""


class WorkerKilledError(WorkerDiedError):
    """Another process ended the worker; no step that it ran is suspect."""


_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Sent by operators, supervisors and a kernel that is short of memory; a crash sends others."""


class WorkerExecutor:
    """One worker process at a time.

    `start`, then `send` and `receive`, then `stop`; after that it may be started again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answer_profile: ProfileAnswer = lambda answer: None

    @property
    def pid(self) -> int | None:
        """The worker's process id while it lives."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Starts the worker and waits until it takes steps.

        Args:
            on_progress: called with each stage of the start.

        Raises:
            WorkerDiedError: it could not start, or not in time; the message says why. No process
                is left behind.
        """
        try:
            async with asyncio.timeout(self._config.worker.worker_start_timeout_s):
                await self._spawn()
                return await self._wait_until_ready(on_progress or _ignore_progress)
        except TimeoutError:
            await self.show_stacks()
            await self.stop()
            raise WorkerDiedError(
                f"the worker was not ready within {self._config.worker.worker_start_timeout_s} s"
            ) from None
        except BaseException:
            await self.stop()
            raise

    def send(self, descriptor: BatchDescriptor) -> None:
        """Orders a step. Never blocks; a worker that is gone shows in `receive`."""
        assert self._writer is not None, "steps are sent between start and stop"
        if not self._writer.is_closing():
            command = WorkerCommand(step=descriptor.SerializeToString())
            self._writer.write(framed(command.SerializeToString()))

    def order_profile(self, order: ProfileStart | ProfileStop, answer: ProfileAnswer) -> None:
        """Orders the start or the end of a profile; `receive` passes on what the worker answers."""
        assert self._writer is not None, "profiles are ordered between start and stop"
        if isinstance(order, ProfileStart):
            command = WorkerCommand(start_profile=order)
        else:
            command = WorkerCommand(stop_profile=order)
        self._answer_profile = answer
        if not self._writer.is_closing():
            self._writer.write(framed(command.SerializeToString()))

    async def receive(self) -> StepResult | GraphReport | Recompilation | CompileReport:
        """Returns the next result, in the order of the steps sent, or other news.

        Raises:
            WorkerDiedError: the worker is gone.
        """
        event = await self._next_event()
        while (profile := _profile_answer(event)) is not None:
            self._answer_profile(profile)
            event = await self._next_event()
        kind = event.WhichOneof("event")
        if kind == "graph":
            return event.graph
        if kind == "recompilation":
            return event.recompilation
        if kind == "compiled":
            return event.compiled
        if kind != "result":
            raise WorkerDiedError(f"the worker sent {kind}, not a result")
        return event.result

    async def show_stacks(self) -> None:
        """Has a worker that does not answer write on standard error what its threads do."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            os.kill(pid, signal.SIGCONT)  # what was stopped handles no signal
        # Were it ended at once, the signal that ends it would overtake.
        await asyncio.sleep(STACKS_GRACE_S)

    async def stop(self) -> None:
        """Ends the worker, by force if it does not end in STOP_GRACE_S. May be called again."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
            self._reader = self._writer = None
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
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

    async def _spawn(self) -> None:
        """Starts the process and connects to it."""
        ours, theirs = socket.socketpair()
        with theirs, standard_error_for_child() as stderr:
            try:
                arguments = ["--socket-fd", str(theirs.fileno()), "--rank", "0"]
                arguments += ["--config", self._config.model_dump_json()]
                self._process = await asyncio.create_subprocess_exec(
                    *child_command(WORKER_MODULE, arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(self._config),
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=ours, limit=_READ_AHEAD_BYTES
        )

    async def _wait_until_ready(self, on_progress: Callable[[str], None]) -> WorkerReady:
        """Follows the worker's start."""
        while True:
            event = await self._next_event()
            kind = event.WhichOneof("event")
            if kind == "ready":
                return event.ready
            if kind != "progress":
                raise WorkerDiedError(f"the worker sent {kind} before it was ready")
            on_progress(event.progress.stage)

    async def _next_event(self) -> WorkerEvent:
        """Returns what the worker says next, unless that is its end.

        The kernel closes a dead process's socket, so its end shows here at once.
        """
        if self._reader is None:
            raise WorkerDiedError("the worker was stopped")
        try:
            event = WorkerEvent.FromString(await read_message(self._reader))
        except EOFError:
            raise await self._exit_report() from None
        except WireError as error:
            raise WorkerDiedError(f"the worker does not make sense: {error}") from error
        if event.HasField("failure"):
            where = (
                f"in step {event.failure.step_id}" if event.failure.step_id else "while starting"
            )
            raise WorkerDiedError(f"the worker failed {where}: {event.failure.error}")
        return event

    async def _exit_report(self) -> WorkerDiedError:
        """Says how a worker ended that has hung up."""
        process = self._process
        if process is None:
            return WorkerDiedError("the worker was stopped")
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                code = await process.wait()
        except TimeoutError:
            return WorkerDiedError("the worker hung up but still runs")
        if code >= 0:
            return WorkerDiedError(f"the worker exited with code {code}")
        number = signal.Signals(-code)
        kind = WorkerKilledError if number in _OUTSIDE_SIGNALS else WorkerDiedError
        return kind(f"the worker was killed by {number.name}")


def _profile_answer(event: WorkerEvent) -> ProfileStarted | ProfileReport | None:
    """Returns an event's word on a profile, if it is one."""
    if event.HasField("profile_started"):
        return event.profile_started
    return event.profile_ended if event.HasField("profile_ended") else None


def _environment(config: EngineConfig) -> dict[str, str]:
    """Returns the worker's environment: ours, our import root first, a thread count, a log level.

    OpenMP and MKL read their count when torch is imported, before any configuration is.
    """
    search_path = [str(_IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(config.worker.num_threads)
    return {
        # torch's profiler would write to standard error, between the lines of the log.
        "KINETO_LOG_LEVEL": "6",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search_path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def _ignore_progress(stage: str) -> None:
    """Takes a stage of the start and does nothing."""
