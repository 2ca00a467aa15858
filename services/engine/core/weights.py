"""The weights that serve, and their replacement by others while requests run."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from protos.engine.v1.worker_pb2 import (
    CheckWeights,
    DropWeights,
    OrderAnswer,
    SwapWeights,
    WorkerCommand,
)
from services.engine.checkpoint.kept_weights import KeptWeights, WeightsFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.config.weights import WEIGHTS_VERSION
from services.engine.core.step_loop import StepLoop
from services.engine.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
)
from services.engine.kv_cache.block_events import BlockEvents
from services.engine.request import Request, RequestStatus
from services.engine.worker.rank_orders import RankOrders
from services.engine.worker.rank_process import WorkerDiedError

log = structlog.get_logger()

MAX_KEPT = 64
"""Most parts that a restarted worker loads one over the other; then a whole checkpoint is due."""
DRAIN_POLL_S = 0.01
"""Pause between looks at whether requests on the old weights still run."""
SALT_BYTES = 16


class Running(Enum):
    """The way of running requests when the weights change."""

    FINISH = "finish"
    RECOMPUTE = "recompute"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How a caller wants the weights to change.

    version: their name in answers. running: what running requests do. is_part: whether tensors may
    be missing.
    """

    version: str
    running: Running = Running.FINISH
    is_part: bool = False


class WeightsWorker(Protocol):
    """The part of an executor that changes weights."""

    @property
    def orders(self) -> RankOrders:
        """Orders that every rank answers."""

    @property
    def pid(self) -> int | None:
        """The first rank's process."""


class WeightsStart(Protocol):
    """The part of an executor that starts a worker with other weights."""

    def apply_weights(self, folders: Sequence[Path]) -> None:
        """Has the start load checkpoints over the model's weights, in order."""


ExecutorT = TypeVar("ExecutorT", bound=WeightsStart)


class Weights:
    """Which weights serve. All methods run in one event loop; one update runs at a time."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        live: Callable[[], Iterable[Request]],
        events: Sequence[BlockEvents],
        check_awake: Callable[[], None],
    ) -> None:
        """Starts with the weights of the command line.

        Args:
            config: the engine's.
            live: returns all live requests.
            events: each rank's record of cached blocks.
            check_awake: raises EngineUnavailableError while the engine sleeps.
        """
        self._config = config
        self._live = live
        self._events = events
        self._check_awake = check_awake
        self.folder = WeightsFolder(config.weights.weights_folder)
        """Where updates come from, and where copies of them are kept."""
        self.version = config.weights.weights_version
        """Name of the weights in answers; empty if they have none."""
        self.salt = os.urandom(SALT_BYTES) if config.weights.apply_weights else b""
        """Keeps what other weights have cached apart, on disk, too."""
        self.num_updates = self.num_moved = 0
        self.pause_s = 0.0
        """How long the last update stopped the steps."""
        self._kept: list[KeptWeights] = []
        self._updating: asyncio.Task[None] | None = None
        self._is_swapping = False
        self._steps: StepLoop | None = None
        self._worker: WeightsWorker | None = None

    @property
    def is_updating(self) -> bool:
        """Whether an update runs."""
        return self._updating is not None

    @property
    def folders(self) -> list[Path]:
        """Checkpoints that a new worker loads over the model's own, in order."""
        return [*self._config.weights.apply_weights, *(each.folder for each in self._kept)]

    def mark(self, request: Request) -> None:
        """Notes the weights that a new request begins with."""
        request.weights_salt, request.weights_version = self.salt, self.version

    def prepared(self, make_executor: Callable[[], ExecutorT]) -> Callable[[], ExecutorT]:
        """Returns what makes executors whose workers start with `folders`."""

        def make() -> ExecutorT:
            executor = make_executor()
            if self.num_updates:
                executor.apply_weights(self.folders)
            return executor

        return make

    def use_worker(self, worker: WeightsWorker, steps: StepLoop) -> None:
        """Takes a new worker, which has loaded `folders`.

        Raises:
            WorkerDiedError: an operator's files have changed, so it has other weights.
        """
        for each in self._kept:
            if each.has_changed:
                raise WorkerDiedError(
                    f"the files in {each.folder} have changed since they became the weights "
                    f"{self.version!r}; put them back, or start the engine again"
                )
        self._worker, self._steps = worker, steps

    def lose_worker(self) -> None:
        """Changes nothing until the next worker."""
        self._worker = self._steps = None

    async def update(self, wanted: Update, obtain: Callable[[], Awaitable[KeptWeights]]) -> None:
        """Replaces the weights, all or nothing. Cancelling it before the exchange changes nothing.

        Args:
            wanted: how.
            obtain: returns the new weights, which this object owns from then on.

        Raises:
            NotPermittedError: the operator allows no updates.
            DuplicateRequestError: the weights have this version already.
            InvalidRequestError: something is wrong with the new weights.
            EngineUnavailableError: another update runs, the engine sleeps, or the worker was lost.
        """
        self.folder.check()
        self._check_awake()
        if self._updating is not None:
            raise EngineUnavailableError("another update of the weights runs")
        self._check(wanted)
        task = self._updating = asyncio.create_task(self._update(wanted, obtain))
        task.add_done_callback(self._end_update)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._is_swapping:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            raise

    def _check(self, wanted: Update) -> None:
        if WEIGHTS_VERSION.fullmatch(wanted.version) is None:
            raise InvalidRequestError(
                "a version has 1 to 128 letters, digits and . _ - / @ : +", field="version"
            )
        if wanted.version == self.version:
            raise DuplicateRequestError(f"the weights are {wanted.version!r} already")
        sees_images = self._config.images.language_model_only is False
        if wanted.running is Running.KEEP and sees_images:
            raise InvalidRequestError(
                "running requests cannot keep their cache in a model that sees images: encoded "
                "images are shared; use finish or recompute",
                field="running",
            )
        if wanted.is_part and len(self._kept) >= MAX_KEPT:
            raise InvalidRequestError(
                f"the weights are made of {MAX_KEPT} parts; send a whole checkpoint"
            )

    def _end_update(self, task: asyncio.Task[None]) -> None:
        self._updating = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("weights_update_failed", error=str(error))

    async def _update(self, wanted: Update, obtain: Callable[[], Awaitable[KeptWeights]]) -> None:
        new = await obtain()
        try:
            await self._exchange(*self._present(), new, wanted)
        except WorkerDiedError:
            new.discard()
            raise EngineUnavailableError(
                f"the worker was lost during the update; the weights stay {self.version!r}"
            ) from None
        except BaseException:
            new.discard()
            raise

    def _present(self) -> tuple[WeightsWorker, StepLoop]:
        if self._worker is None or self._steps is None:
            raise EngineUnavailableError("the engine is not ready: its worker is starting")
        return self._worker, self._steps

    async def _exchange(
        self, worker: WeightsWorker, steps: StepLoop, new: KeptWeights, wanted: Update
    ) -> None:
        """Checks new weights beside running steps, and loads them between two."""
        order = CheckWeights(path=str(new.folder), is_part=wanted.is_part)
        try:
            _check_answers(await worker.orders.run(WorkerCommand(check_weights=order)))
            async with self._paused(steps, wanted.running) as orders:
                started_s = time.monotonic()
                await self._swap(worker, orders)
                self._adopt(steps, new, wanted)
                self.pause_s = time.monotonic() - started_s
        except (asyncio.CancelledError, InvalidRequestError):
            if self._steps is steps:
                with contextlib.suppress(WorkerDiedError):
                    await worker.orders.run(WorkerCommand(drop_weights=DropWeights()))
            raise
        log.info(
            "weights_updated",
            version=self.version,
            num_moved_requests=self.num_moved,
            pause_ms=round(1000 * self.pause_s, 1),
        )

    @asynccontextmanager
    async def _paused(self, steps: StepLoop, running: Running) -> AsyncIterator[RankOrders]:
        """Runs the block between two steps, once requests are where they are to be."""
        try:
            if running is Running.FINISH:
                for holdings in steps.scheduler.holdings:
                    holdings.waiting.hold_new()
                while any(each.started is not None for each in self._live()):
                    await asyncio.sleep(DRAIN_POLL_S)
                    if self._steps is not steps:
                        raise WorkerDiedError("the worker was lost")
            async with steps.pause.hold() as orders:
                self._is_swapping = True
                yield orders
        finally:
            self._is_swapping = False
            for holdings in steps.scheduler.holdings:
                holdings.waiting.release_new()
            steps.wake()

    async def _swap(self, worker: WeightsWorker, orders: RankOrders) -> None:
        """Has all ranks load the checked weights; a worker that cannot is lost.

        Raises:
            WorkerDiedError: it is lost; the next one loads the weights of before.
        """
        try:
            async with asyncio.timeout(self._config.worker.worker_start_timeout_s):
                await orders.run(WorkerCommand(swap_weights=SwapWeights()))
        except TimeoutError:
            if worker.pid is not None:
                os.kill(worker.pid, signal.SIGKILL)
            raise WorkerDiedError("the worker did not load weights in time") from None

    def _adopt(self, steps: StepLoop, new: KeptWeights, wanted: Update) -> None:
        """Makes the loaded weights the present ones, for all requests."""
        keeps_cache = wanted.running is Running.KEEP
        self.num_moved = 0
        for request in self._live():
            is_running = request.status is RequestStatus.RUNNING
            self.num_moved += request.started is not None
            if request.first_token is not None or (is_running and keeps_cache):
                request.first_weights_version = request.first_weights_version or self.version
            request.weights_version = wanted.version
        self.version, self.salt = wanted.version, os.urandom(SALT_BYTES)
        self.num_updates += 1
        self._keep(new, wanted)
        for holdings in steps.scheduler.holdings:
            holdings.change_weights(self.salt, keeps_cache=keeps_cache)
        for events in self._events:
            events.clear()

    def _keep(self, new: KeptWeights, wanted: Update) -> None:
        """Keeps what the next worker needs of the present weights, in order."""
        kept = []
        for each in self._kept:
            is_covered = each.names is not None and each.names <= (new.names or frozenset())
            if is_covered or not wanted.is_part:
                each.discard()
            else:
                kept.append(each)
        self._kept = [*kept, new]


def _check_answers(answers: Sequence[OrderAnswer]) -> None:
    """Raises InvalidRequestError unless all ranks found the same weights good."""
    for each in answers:
        if each.error:
            raise InvalidRequestError(each.error)
        if each.digest != answers[0].digest:
            raise InvalidRequestError("ranks have read different files")
