"""Starts a worker, serves with it, and starts another when it is lost."""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import structlog

from protos.engine.v1.worker_pb2 import ProfileStart, ProfileStop, WorkerReady
from services.engine.core.adapters import AdapterWorker, StartRefusedError
from services.engine.core.stats import Counters
from services.engine.core.step_channel import StepChannel
from services.engine.core.step_loop import WorkerHungError
from services.engine.worker.executor import ProfileAnswer
from services.telemetry.stacks import show_stacks

log = structlog.get_logger()

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
_SHORTAGES = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
STABLE_AFTER_S = 10.0
"""A worker that served for this long, no less than the longest pause, is no repeated failure."""


class Executor(StepChannel, AdapterWorker, Protocol):
    """A worker process as the service sees it."""

    def apply_weights(self, folders: Sequence[Path]) -> None:
        """Has the start load checkpoints over the model's weights, in order."""

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Starts the worker and waits until it takes steps.

        Raises:
            WorkerDiedError: it could not start, with the reason.
        """

    def order_profile(self, order: ProfileStart | ProfileStop, answer: ProfileAnswer) -> None:
        """Orders the start or the end of a profile; `answer` takes what the worker says of it."""

    async def show_stacks(self) -> None:
        """Makes a hung worker write its threads' stacks to standard error."""

    async def stop(self) -> None:
        """Ends the worker, by force if necessary."""

    @property
    def pid(self) -> int | None:
        """The live worker's process id."""


async def _return_at_once() -> None:
    """Waits for nothing."""


class WorkerSupervisor:
    """Runs one worker after the other, with a growing pause after repeated failures."""

    def __init__(
        self,
        *,
        make_executor: Callable[[], Executor],
        serve: Callable[[Executor, WorkerReady], Awaitable[NoReturn]],
        counters: Counters,
        wait_until_wanted: Callable[[], Awaitable[None]] = _return_at_once,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepares to supervise.

        Args:
            make_executor: makes the executor of the next worker.
            serve: uses a ready worker; raises when it is lost.
            counters: counts restarts.
            wait_until_wanted: returns when a worker may be started.
            clock: returns seconds.
            sleep: waits for a number of them.
        """
        self._make_executor = make_executor
        self._serve = serve
        self._counters = counters
        self._wait_until_wanted = wait_until_wanted
        self._clock = clock
        self._sleep = sleep
        self.progress = ""
        """The last stage of a start, or why the last worker was lost; empty while one serves."""

    async def run(self) -> NoReturn:
        """Supervises until it is cancelled.

        Raises:
            WorkerDiedError: the first worker could not start or read an adapter. A shortage of
                processes, memory or files is retried instead.
        """
        backoff_s = MIN_BACKOFF_S
        has_served = False
        while True:
            await self._wait_until_wanted()
            executor = self._make_executor()
            started_s = self._clock()
            try:
                ready = await executor.start(self._note_progress)
                _log_ready(executor, ready, self._clock() - started_s)
                if has_served:
                    self._counters.num_worker_restarts += 1
                has_served = True
                started_s = self._clock()
                self.progress = ""
                await self._serve(executor, ready)
            except StartRefusedError:
                raise
            except Exception as error:  # any error costs a worker, not the service
                if not has_served and not _is_shortage(error):
                    raise
                self.progress = str(error)
                _log_lost(executor, error)
                if isinstance(error, WorkerHungError):
                    show_stacks()
                    await executor.show_stacks()
            finally:
                await executor.stop()
            if self._clock() - started_s > STABLE_AFTER_S:
                backoff_s = MIN_BACKOFF_S
            await self._sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _note_progress(self, stage: str) -> None:
        self.progress = stage
        log.info("worker_progressed", stage=stage)


def _is_shortage(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _log_ready(executor: Executor, ready: WorkerReady, start_s: float) -> None:
    log.info(
        "worker_became_ready",
        worker_pid=executor.pid,
        device=ready.device_name,
        dtype=ready.dtype,
        num_blocks=ready.num_blocks,
        num_parameters=ready.num_parameters,
        load_s=round(ready.load_s, 2),
        start_s=round(start_s, 2),
    )


def _log_lost(executor: Executor, error: Exception) -> None:
    log.error("worker_was_lost", worker_pid=executor.pid, error=str(error), exc_info=error)
