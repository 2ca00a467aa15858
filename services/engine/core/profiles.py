"""Profiles of the worker: at most one at a time, started and ended by callers."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from protos.engine.v1.worker_pb2 import (
    ProfileEnd,
    ProfileReport,
    ProfileStart,
    ProfileStarted,
    ProfileStop,
)
from services.engine.config.observability import ObservabilityConfig
from services.engine.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NotPermittedError,
    ProfileError,
)
from services.engine.worker.executor import ProfileAnswer

log = structlog.get_logger()

MAX_TRACES = 100
"""Traces that the folder may hold; more are refused until an operator removes some."""

SUFFIX = ".trace.json.gz"

Order = Callable[[ProfileStart | ProfileStop, ProfileAnswer], None]
"""Sends an order to the worker, and names the taker of its answers."""


class Profiles:
    """Orders profiles from the worker and passes their reports on.

    All methods run in one event loop.
    """

    def __init__(self, config: ObservabilityConfig, engine_id: str) -> None:
        """Starts without a worker.

        Args:
            config: folder and limits.
            engine_id: part of the names of traces, as engines may share the folder.
        """
        self._config = config
        self._engine_id = engine_id
        self._order: Order | None = None
        self._path = Path()
        self._started: asyncio.Future[None] | None = None
        self._report: asyncio.Future[ProfileReport] | None = None

    def use_worker(self, order: Order) -> None:
        """Profiles this worker from now on."""
        self._order = order

    def lose_worker(self) -> None:
        """Fails the profile that the lost worker ran, if any."""
        self._order = None
        self._fail(EngineUnavailableError("the worker was lost, and its profile with it"))

    async def start(self, *, max_steps: int | None, max_s: float | None) -> Path:
        """Starts a profile; returns the file that will hold its trace.

        Args:
            max_steps: ends it after this many steps; None for no limit.
            max_s: ends it after this many seconds; None for the engine's limit.

        Raises:
            NotPermittedError: the engine has no folder for traces.
            InvalidRequestError: a limit is 0, or above the engine's.
            EngineUnavailableError: there is no worker, or it was lost.
            ProfileError: a profile runs, the folder is full, or the trace cannot be written.
        """
        folder, longest_s = self._config.profile_dir, self._config.profile_max_s
        if folder is None:
            raise NotPermittedError("profiles are not taken; the engine lacks --profile-dir")
        if max_steps == 0 or max_s == 0:
            raise InvalidRequestError("a profile needs at least one step and one millisecond")
        if max_s is not None and max_s > longest_s:
            raise InvalidRequestError(f"a profile takes at most {longest_s:g} s, not {max_s:g} s")
        if self._order is None:
            raise EngineUnavailableError("the engine is not ready: its worker is starting")
        if self._report is not None and not self._report.done():
            raise ProfileError("a profile is running; stop it first")
        path = _new_path(folder.expanduser(), self._engine_id)
        loop = asyncio.get_running_loop()
        self._path, self._started, self._report = path, loop.create_future(), loop.create_future()
        # A failed profile that is not stopped must not count as an unread error.
        self._report.add_done_callback(_read)
        self._order(
            ProfileStart(
                path=str(path),
                max_steps=max_steps or 0,
                max_s=longest_s if max_s is None else max_s,
                max_bytes=self._config.profile_max_mb * 2**20,
            ),
            self._take,
        )
        await asyncio.shield(self._started)
        return path

    async def stop(self) -> tuple[Path, ProfileReport]:
        """Ends the profile and waits for its trace; returns the trace's file and a report.

        A profile that a limit has ended is returned once.

        Raises:
            EngineUnavailableError: the worker was lost.
            ProfileError: no profile was started, or its trace could not be written.
        """
        report, path = self._report, self._path
        if report is None:
            raise ProfileError("no profile is running")
        if not report.done() and self._order is not None:
            self._order(ProfileStop(), self._take)
        try:
            return path, await asyncio.shield(report)
        finally:
            if report.done() and self._report is report:
                self._report = None

    def _take(self, event: ProfileStarted | ProfileReport) -> None:
        assert self._started is not None, "the worker answers orders"
        assert self._report is not None, "the worker answers orders"
        if isinstance(event, ProfileStarted):
            log.info("profile_started", path=str(self._path))
            self._started.set_result(None)
        elif event.error:
            log.warning("profile_failed", path=str(self._path), error=event.error)
            self._fail(ProfileError(event.error))
        else:
            log.info(
                "profile_ended",
                path=str(self._path),
                num_kb=event.num_bytes // 1024,
                num_steps=event.num_steps,
                duration_s=round(event.duration_s, 3),
                end=ProfileEnd.Name(event.end).removeprefix("PROFILE_END_").lower(),
            )
            self._report.set_result(event)

    def _fail(self, error: EngineUnavailableError | ProfileError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
            self._report = None
        elif self._report is not None and not self._report.done():
            self._report.set_exception(error)


def _new_path(folder: Path, engine_id: str) -> Path:
    """Returns a free file name in the folder of traces, which it makes.

    Raises:
        ProfileError: the folder is full or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        num_traces = sum(1 for _ in folder.glob(f"*{SUFFIX}"))
    except OSError as error:
        raise ProfileError(f"the folder of traces cannot be used: {error.strerror}") from error
    if num_traces >= MAX_TRACES:
        raise ProfileError(f"the folder of traces holds {num_traces}, which is the limit")
    now = time.strftime("%Y%m%d-%H%M%S")
    return folder / f"octavo-{now}-{engine_id[:8]}-{time.monotonic_ns() % 10**6:06}{SUFFIX}"


def _read(report: asyncio.Future[ProfileReport]) -> None:
    if not report.cancelled():
        report.exception()
