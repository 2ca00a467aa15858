"""The engine's sleep: its worker gives back the memory of weights and KV cache, until it wakes.

AWAKE -> FALLING_ASLEEP, which lets requests end -> ASLEEP -> WAKING -> AWAKE. New requests are
refused in all states but the first, so that frontends send them to other engines.

A worker that is lost while it sleeps has no successor until the engine wakes: another program
may have its memory. One that is lost while it wakes is replaced at once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import structlog

from protos.engine.v1.worker_pb2 import OrderAnswer, SleepOrder, WakeOrder, WorkerCommand
from services.engine.config.worker import WorkerConfig
from services.engine.core.live_requests import LiveRequests
from services.engine.core.step_loop import StepLoop
from services.engine.errors import (
    DeadlineExpiredError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    MemoryExhaustedError,
    NotPermittedError,
    SleepError,
)
from services.engine.worker.rank_orders import RankOrders
from services.engine.worker.rank_process import WorkerDiedError

log = structlog.get_logger()

LEVELS = (1, 2)


class SleepState(Enum):
    """Whether the engine can take requests."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class SleepMode(Enum):
    """The fate of the requests that are live when the engine falls asleep."""

    WAIT = "wait"
    RECOMPUTE = "recompute"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SleepReport:
    """The end of a change: the bytes that all ranks gave back or took, and the time."""

    num_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class _Held:
    """The pause of the step loop, for the length of a sleep."""

    pause: AsyncExitStack
    orders: RankOrders


class Sleep:
    """Puts the engine to sleep and wakes it, one call after the other."""

    def __init__(
        self,
        config: WorkerConfig,
        requests: LiveRequests,
        *,
        abort_all: Callable[[EngineError], None],
        is_updating: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """Starts awake, or asleep without a worker.

        Args:
            config: whether the worker can sleep, whether the engine starts so, and how long a
                change may take.
            requests: the live ones.
            abort_all: ends them.
            is_updating: returns whether an update of the weights runs.
            on_change: called when the engine may take requests, or not any more.
        """
        self.state = SleepState.ASLEEP if config.start_asleep else SleepState.AWAKE
        self.level = LEVELS[-1] if config.start_asleep else 0
        """Level of the present sleep; 0 without one."""
        self._config = config
        self._requests = requests
        self._abort_all = abort_all
        self._is_updating = is_updating
        self._on_change = on_change
        self._steps: StepLoop | None = None
        self._held: _Held | None = None
        self._turn = asyncio.Lock()
        self._may_start = asyncio.Event()
        if self.is_awake:
            self._may_start.set()
        self._woke = asyncio.Event()
        self._fault = ""
        """Why no worker can be started any more."""

    @property
    def is_awake(self) -> bool:
        """Whether requests are taken and the model's memory is there."""
        return self.state is SleepState.AWAKE

    def check_awake(self) -> None:
        """Raises EngineUnavailableError unless `is_awake`."""
        if not self.is_awake:
            raise EngineUnavailableError(f"the engine is {self.state.value}")

    def use_worker(self, steps: StepLoop) -> None:
        """Takes the steps of a new worker, which is awake."""
        self._steps = steps
        if self.state is SleepState.WAKING:
            self._enter(SleepState.AWAKE)

    def lose_worker(self) -> None:
        """Notes the loss of the worker."""
        self._steps = None
        if self.state is SleepState.ASLEEP:
            self._may_start.clear()
            log.warning("worker_was_lost_asleep", level=self.level)

    def fail(self, reason: str) -> None:
        """Ends calls that wait for a worker, as the engine stops without one."""
        self._fault = reason
        self._woke.set()

    async def wait_until_wanted(self) -> None:
        """Returns when a worker may be started: at once, unless the engine sleeps without one."""
        await self._may_start.wait()

    async def fall_asleep(self, level: int, mode: SleepMode, timeout_s: float) -> SleepReport:
        """Ends or keeps the live requests and gives the memory back.

        The prefix cache is empty afterwards, except for blocks in the host's memory and on disk.

        Args:
            level: 1 keeps the weights in the host's memory, 2 loads them from the checkpoint again.
            mode: WAIT lets live requests end; RECOMPUTE keeps them, and computes them again after
                waking; ABORT ends them as unavailable.
            timeout_s: longest wait for the end of requests.

        Raises:
            NotPermittedError: the engine lacks --enable-sleep.
            InvalidRequestError: there is no such level.
            SleepError: it sleeps at another level, its weights are being updated, or the worker
                cannot sleep.
            DeadlineExpiredError: requests did not end in time; the engine stays awake.
            EngineUnavailableError: there is no worker, or it was lost.
        """
        self._check_allowed()
        if level not in LEVELS:
            raise InvalidRequestError(f"level is {level}; it must be 1 or 2", field="level")
        async with self._turn:
            if self.state is SleepState.ASLEEP:
                if level != self.level:
                    raise SleepError(f"the engine sleeps at level {self.level}; wake it first")
                return SleepReport(0, 0.0)
            if self._is_updating():
                raise SleepError("the engine's weights are being updated")
            steps = self._steps
            if steps is None:
                raise EngineUnavailableError("the engine is not ready: its worker is starting")
            started_s = time.monotonic()
            self._enter(SleepState.FALLING_ASLEEP)
            try:
                await self._end_requests(mode, timeout_s)
                num_bytes = await _to_its_end(self._give_back(steps, level))
            finally:
                if self.state is SleepState.FALLING_ASLEEP:
                    self._enter(SleepState.AWAKE)
            return SleepReport(num_bytes, time.monotonic() - started_s)

    async def wake(self) -> SleepReport:
        """Takes the memory again; requests that were kept go on.

        Raises:
            NotPermittedError: the engine lacks --enable-sleep.
            MemoryExhaustedError: a device or the host has too little; the engine stays asleep.
            EngineUnavailableError: the worker was lost, and no other was ready in time; the engine
                goes on trying.
        """
        self._check_allowed()
        async with self._turn:
            if self.is_awake:
                return SleepReport(0, 0.0)
            started_s = time.monotonic()
            self._enter(SleepState.WAKING)
            num_bytes = await _to_its_end(self._take_again())
            return SleepReport(num_bytes, time.monotonic() - started_s)

    def _check_allowed(self) -> None:
        if not self._config.enable_sleep:
            raise NotPermittedError("the engine cannot sleep; it lacks --enable-sleep")

    async def _end_requests(self, mode: SleepMode, timeout_s: float) -> None:
        if mode is SleepMode.ABORT:
            self._abort_all(EngineUnavailableError("the engine falls asleep"))
        if mode is not SleepMode.WAIT:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._requests.wait_until_empty()
        except TimeoutError:
            raise DeadlineExpiredError(
                f"{len(self._requests)} requests did not end within {timeout_s:g} s; the engine "
                "stays awake. Mode recompute keeps them, abort ends them"
            ) from None

    async def _give_back(self, steps: StepLoop, level: int) -> int:
        """Has the worker give its memory back, and keeps its steps paused; returns the bytes."""
        order = WorkerCommand(sleep=SleepOrder(level=level))
        async with _reporting_loss(), AsyncExitStack() as stack:
            orders = await stack.enter_async_context(steps.pause.hold())
            steps.scheduler.drop_cache()
            answers = await self._run(orders, order)
            if fault := _fault_of(answers):
                await self._run(orders, WorkerCommand(wake=WakeOrder()))
                raise SleepError(fault)
            self._held = _Held(stack.pop_all(), orders)
        self.level = level
        self._enter(SleepState.ASLEEP)
        return sum(each.num_bytes for each in answers)

    async def _take_again(self) -> int:
        """Wakes the worker, or has another one started; returns the bytes that the ranks took."""
        held, self._held = self._held, None
        if held is not None and self._steps is not None:
            with contextlib.suppress(EngineUnavailableError):
                return await self._wake_worker(held)
        elif held is not None:
            await held.pause.aclose()
        self._woke.clear()
        self._may_start.set()
        limit_s = self._config.worker_start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._woke.wait()
        except TimeoutError:
            raise EngineUnavailableError(
                f"the worker was lost, and no other one was ready within {limit_s:g} s"
            ) from None
        if self._fault:
            raise EngineUnavailableError(f"the engine stops: {self._fault}")
        return 0

    async def _wake_worker(self, held: _Held) -> int:
        async with _reporting_loss(), held.pause as stack:
            answers = await self._run(held.orders, WorkerCommand(wake=WakeOrder()))
            if fault := _fault_of(answers):
                # Ranks that had enough memory must not keep it.
                await self._run(held.orders, WorkerCommand(sleep=SleepOrder(level=self.level)))
                self._held = _Held(stack.pop_all(), held.orders)
                self._enter(SleepState.ASLEEP)
                raise MemoryExhaustedError(f"the engine stays asleep: {fault}")
            self._enter(SleepState.AWAKE)
        return sum(each.num_bytes for each in answers)

    async def _run(self, orders: RankOrders, command: WorkerCommand) -> list[OrderAnswer]:
        async with asyncio.timeout(self._config.worker_start_timeout_s):
            return await orders.run(command)

    def _enter(self, state: SleepState) -> None:
        log.info("sleep_state_changed", state=state.value, level=self.level)
        self.state = state
        if state is SleepState.AWAKE:
            self.level = 0
            self._woke.set()
        self._on_change()


def _fault_of(answers: list[OrderAnswer]) -> str:
    """Returns why a rank has not carried out an order; empty if all have."""
    return next((each.error for each in answers if each.error), "")


@asynccontextmanager
async def _reporting_loss() -> AsyncIterator[None]:
    """Makes the loss of a worker, or its silence, which ends it, an error for callers."""
    try:
        yield
    except WorkerDiedError as error:
        raise EngineUnavailableError(f"the worker was lost: {error}") from None
    except TimeoutError:
        raise EngineUnavailableError("the worker did not answer in time") from None


async def _to_its_end(work: Coroutine[None, None, int]) -> int:
    """Runs what must not stop halfway, even if the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
