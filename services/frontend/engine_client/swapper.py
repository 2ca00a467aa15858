"""Models that share a card: puts the one that is awake to sleep and wakes another, by demand.

One engine at most holds the card's memory. While another model is wanted, the awake one keeps the
card until it is idle, or until its time is up: `min_awake_s` with requests, then `drain_s` in which
running requests may end and new ones wait. Requests that still run then are kept by their engine
and computed again when it wakes; if the oldest of them got no token, the next such time is twice as
long. The model whose oldest request waits longest is next, so each is awake again after one time of
every other.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import structlog

from services.frontend.config import FrontendConfig
from services.frontend.engine_client.sleep_orders import SleepOrders
from services.frontend.engine_client.turns import Phase, Seat, SharingEngine, Turn, check_room
from services.frontend.errors import EngineFaultError, EngineUnavailableError, FrontendError
from services.telemetry.histogram import Histogram

log = structlog.get_logger()

LOST_S = 10.0
"""Time for which a lost engine may still hold the card. Its successor connects sooner."""
ASK_AGAIN_S = 1.0
MAX_BACKOFF_S = 30.0
LEAST_DOUBLED_S = 1.0
MAX_DOUBLINGS = 12
"""Most doublings of the time for running requests to end: enough for any context's prompt."""
MAX_SLEEP_FAILURES = 5
"""Failures in a row, of an engine that must fall asleep, after which others stop waiting."""
RECOMPUTE = "recompute"
SWAP_SECONDS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLimits:
    """How models share a card."""

    level: int = 1
    """Level of sleep: 1 keeps weights in the host's memory, 2 loads them again."""
    min_awake_s: float = 10.0
    """Time for which a model with requests stays awake while another is wanted."""
    drain_s: float = 10.0
    """Time for running requests to end after that; then they are computed again later."""
    max_waiting: int = 1024
    """Requests that may wait for a model."""
    names_reasons: bool = True
    """Whether errors show callers why an engine did not obey; the log always does."""

    @classmethod
    def of(cls, config: FrontendConfig, level: int, *, names_reasons: bool) -> Self:
        """Reads the limits of a configuration with a level of sleep."""
        return cls(
            names_reasons=names_reasons,
            level=level,
            min_awake_s=config.swap_min_awake_s,
            drain_s=config.swap_drain_s,
            max_waiting=config.swap_max_waiting,
        )


@dataclass(slots=True)
class SwapCounts:
    """Changes since the start."""

    num_wakes: dict[str, int]
    """Times that each model was woken."""
    num_failures: dict[str, int]
    """Orders that each model's engine did not carry out."""
    seconds: Histogram
    """Time of whole swaps: from the order to sleep to the awake model."""
    num_kept: int = 0
    """Requests that were running when their model fell asleep."""


class Swapper:
    """Decides which engine of a card is awake; `run` gives the orders."""

    def __init__(self, limits: SwapLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows no engine yet; `clock` returns seconds."""
        self.limits = limits
        self.counts = SwapCounts({}, {}, Histogram(SWAP_SECONDS))
        self._clock = clock
        self._seats: dict[SharingEngine, Seat] = {}
        self._news = asyncio.Event()
        self._num_needed = math.inf
        """Connected engines from which on requests are taken."""

    @property
    def is_ready(self) -> bool:
        """Whether models can be asked for: all at first, later any."""
        return self._num_connected >= self._num_needed

    @property
    def num_waiting(self) -> dict[str, int]:
        """Requests that wait for each model."""
        return {seat.name: len(seat.waiting) for seat in self._connected_last}

    @property
    def awake(self) -> dict[str, bool]:
        """Whether each model is awake."""
        return {
            seat.name: seat.phase in (Phase.AWAKE, Phase.CLOSING) for seat in self._connected_last
        }

    def ask(self, name: str, *, was_refused: bool = False) -> Turn:
        """Asks for a turn at a model.

        Args:
            name: of the model.
            was_refused: whether the request had a turn, and the engine fell asleep before it came.

        Raises:
            EngineUnavailableError: the model's engine is not there.
            OverloadedError: too many requests wait for the model.
        """
        seat = self._seat(name)
        if seat is None or not seat.is_connected:
            raise EngineUnavailableError(f"the engine of the model {name!r} is not there now")
        if not was_refused:
            check_room(seat, self.limits.max_waiting)
        self._news.set()
        return Turn(seat, asked_s=self._clock())

    def is_swapped_out(self, name: str) -> bool:
        """Whether a connected engine refuses requests because it does not have the card."""
        seat = self._seat(name)
        return seat is not None and seat.is_connected and seat.phase is not Phase.AWAKE

    def note(self, engine: SharingEngine) -> None:
        """Takes note of a change of an engine's connection or readiness."""
        if engine.info is not None and engine not in self._seats:
            self._forget(engine.info.model)
            self._seats[engine] = Seat(
                engine.info.model, engine, now_s=self._clock(), on_end=self._news.set
            )
        seat = self._seats.get(engine)
        if seat is None:
            return
        if engine.info is not None:
            seat.name = engine.info.model
        if engine.is_connected and not seat.is_connected:
            seat.lost.clear()
            seat.enter(Phase.UNKNOWN, self._clock())
        elif not engine.is_connected and seat.is_connected:
            self._lose(seat)
        elif seat.phase is not Phase.CHANGING and engine.is_asleep != (seat.phase is Phase.ASLEEP):
            seat.enter(Phase.UNKNOWN, self._clock())  # an order of another program, or old news
        self._news.set()

    async def run(self, num_engines: int) -> NoReturn:
        """Swaps models until cancelled, once `num_engines` have connected or had time to."""
        self._num_needed = num_engines
        end_s = self._clock() + LOST_S
        while not self.is_ready and (left_s := end_s - self._clock()) > 0:
            await self._wait(left_s)
        self._num_needed = 1
        while True:
            for seat in list(self._seats.values()):
                if seat.phase is Phase.UNKNOWN and seat.is_connected:
                    await self._learn(seat)
            await self._wait(await self._act())

    async def _wait(self, timeout_s: float | None) -> None:
        """Waits for news, or until a time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()

    @property
    def _num_connected(self) -> int:
        return sum(seat.is_connected for seat in self._seats.values())

    async def _act(self) -> float | None:
        """Gives the orders that are due; returns after how many seconds to look again."""
        now_s = self._clock()
        holders = [seat for seat in self._seats.values() if self._may_hold(seat)]
        wanted = self._wanted(holders)
        if any(seat.phase is Phase.UNKNOWN for seat in holders):
            return self._next_look(holders)
        if len(holders) > 1:
            surplus = min(holders, key=lambda seat: len(seat.running))
            if self._may_order(surplus):
                await self._put_to_sleep(surplus)
                return 0.0
        elif wanted is not None and not holders:
            await self._wake(wanted, started_s=now_s)
            return 0.0
        elif holders and self._is_over(holders[0], is_wanted=wanted is not None):
            assert wanted is not None, "a model stays unless another is wanted"
            await self._swap(holders[0], wanted)
            return 0.0
        return self._next_look(holders)

    def _wanted(self, holders: list[Seat]) -> Seat | None:
        """Returns the sleeping model whose demand is the oldest."""
        wanted = [
            (seat.demand_since_s, index, seat)
            for index, seat in enumerate(self._seats.values())
            if seat not in holders and seat.phase is Phase.ASLEEP and self._may_order(seat)
        ]
        return min(
            ((since_s, index, seat) for since_s, index, seat in wanted if since_s is not None),
            default=(0.0, 0, None),
        )[2]

    def _is_over(self, holder: Seat, *, is_wanted: bool) -> bool:
        """Returns whether the awake model is to fall asleep now; opens and closes it before."""
        now_s = self._clock()
        may_leave = is_wanted and self._may_order(holder)
        if holder.phase is Phase.CLOSING and not may_leave:
            holder.enter(Phase.AWAKE, now_s)
        if not may_leave or holder.phase not in (Phase.AWAKE, Phase.CLOSING):
            return False
        if not holder.running:
            return True
        if holder.phase is Phase.AWAKE and now_s >= holder.since_s + self.limits.min_awake_s:
            holder.enter(Phase.CLOSING, now_s)
        return holder.phase is Phase.CLOSING and now_s >= holder.since_s + self._drain_s(holder)

    def _next_look(self, holders: list[Seat]) -> float | None:
        """Returns the seconds until the next time that is worth a look; None if there is none."""
        now_s = self._clock()
        times = [at_s for seat in self._seats.values() for at_s in (seat.retry_at_s, seat.ask_at_s)]
        for seat in holders:
            if not seat.is_connected:
                times.append(seat.since_s + LOST_S)
            elif seat.phase is Phase.AWAKE:
                times.append(seat.since_s + self.limits.min_awake_s)
            elif seat.phase is Phase.CLOSING:
                times.append(seat.since_s + self._drain_s(seat))
        return min((each - now_s for each in times if each > now_s), default=None)

    def _drain_s(self, seat: Seat) -> float:
        """Returns how long the running requests of a model that makes room may take to end."""
        if not seat.num_vain_turns:
            return self.limits.drain_s
        times = 2.0 ** min(seat.num_vain_turns, MAX_DOUBLINGS)
        return times * max(self.limits.drain_s, LEAST_DOUBLED_S)

    def _may_hold(self, seat: Seat) -> bool:
        """Returns whether an engine may have memory of the card."""
        if seat.is_connected:
            return seat.phase is not Phase.ASLEEP
        return seat.phase is not Phase.ASLEEP and self._clock() < seat.since_s + LOST_S

    def _may_order(self, seat: Seat) -> bool:
        return seat.is_connected and self._clock() >= seat.retry_at_s

    def _seat(self, name: str) -> Seat | None:
        return {seat.name: seat for seat in self._connected_last}.get(name)

    @property
    def _connected_last(self) -> list[Seat]:
        """The seats; one whose engine moved to another address comes before its successor."""
        return sorted(self._seats.values(), key=lambda seat: seat.is_connected)

    def _forget(self, name: str) -> None:
        """Drops lost engines of a model, which has another address now."""
        for engine, seat in list(self._seats.items()):
            if seat.name == name and not seat.is_connected and not self._may_hold(seat):
                del self._seats[engine]

    def _lose(self, seat: Seat) -> None:
        """Fails requests that wait for a lost engine; running ones fail with its session."""
        seat.lost.set()
        if seat.phase is not Phase.ASLEEP:
            seat.enter(Phase.UNKNOWN, self._clock())
            seat.since_s = self._clock()
        seat.fail_waiting(EngineUnavailableError(f"the engine of the model {seat.name!r} was lost"))

    async def _learn(self, seat: Seat) -> None:
        """Asks an engine whether it sleeps."""
        if self._clock() < seat.ask_at_s:
            return
        try:
            has_memory = await self._order(seat, lambda orders: orders.has_memory())
        except (FrontendError, EngineFaultError) as error:
            log.warning("sharing_engine_did_not_answer", model=seat.name, reason=str(error))
            seat.ask_at_s = self._clock() + ASK_AGAIN_S
            return
        seat.enter(Phase.AWAKE if has_memory else Phase.ASLEEP, self._clock())

    async def _swap(self, holder: Seat, wanted: Seat) -> None:
        """Has one model make room for another."""
        started_s, num_kept = self._clock(), len(holder.running)
        if not await self._put_to_sleep(holder):
            return
        await self._wake(wanted, started_s=started_s, slept=holder.name, num_kept=num_kept)

    async def _put_to_sleep(self, seat: Seat) -> bool:
        """Frees the card; returns whether that was possible."""
        seat.enter(Phase.CHANGING, self._clock())
        level = self.limits.level
        try:
            await self._order(seat, lambda orders: orders.sleep(level, RECOMPUTE))
        except (FrontendError, EngineFaultError) as error:
            self._note_failure(seat, "sleep", error)
            is_lasting = not isinstance(error, EngineUnavailableError)
            if seat.is_connected and (is_lasting or seat.num_failures >= MAX_SLEEP_FAILURES):
                text = f"the model {seat.name!r} has the card and cannot be put to sleep"
                for other in self._seats.values():
                    if other is not seat:
                        other.fail_waiting(self._unavailable(text, error))
            return False
        seat.num_failures = 0
        seat.count_vain_turn()
        seat.enter(Phase.ASLEEP, self._clock())
        self.counts.num_kept += len(seat.running)
        return True

    async def _wake(
        self, seat: Seat, *, started_s: float, slept: str = "", num_kept: int = 0
    ) -> None:
        """Gives a model the card, which is free since another one fell asleep, or was free."""
        if not seat.is_connected:  # lost while the other one fell asleep
            return
        slept_s = self._clock()
        seat.enter(Phase.CHANGING, slept_s)
        try:
            await self._order(seat, lambda orders: orders.wake())
        except (FrontendError, EngineFaultError) as error:
            if seat.phase is Phase.CHANGING:  # else it was lost, and failed them
                text = f"the model {seat.name!r} could not be woken"
                seat.fail_waiting(self._unavailable(text, error))
            self._note_failure(seat, "wake", error)
            return
        seat.num_failures = 0
        now_s = self._clock()
        self.counts.seconds.observe(now_s - started_s)
        counts = self.counts.num_wakes
        counts[seat.name] = counts.get(seat.name, 0) + 1
        log.info(
            "models_swapped",
            asleep=slept,
            awake=seat.name,
            num_kept=num_kept,
            num_waiting=len(seat.waiting),
            sleep_s=round(slept_s - started_s, 3),
            wake_s=round(now_s - slept_s, 3),
        )
        seat.enter(Phase.AWAKE, now_s)

    def _unavailable(self, text: str, reason: Exception) -> EngineUnavailableError:
        """Returns the error for requests that wait for an order in vain."""
        return EngineUnavailableError(f"{text}: {reason}" if self.limits.names_reasons else text)

    def _note_failure(self, seat: Seat, order: str, error: Exception) -> None:
        """Has the engine be asked for its state, and given the next order after a pause."""
        now_s = self._clock()
        seat.num_failures += 1
        seat.retry_at_s = now_s + min(2.0 ** (seat.num_failures - 1), MAX_BACKOFF_S)
        counts = self.counts.num_failures
        counts[seat.name] = counts.get(seat.name, 0) + 1
        log.warning("swap_failed", model=seat.name, order=order, reason=str(error))
        if seat.is_connected:
            seat.enter(Phase.UNKNOWN, now_s)

    async def _order(self, seat: Seat, call: Callable[[SleepOrders], Awaitable[Any]]) -> Any:
        """Gives an order, which fails with EngineUnavailableError when the engine is lost."""
        orders = seat.engine.sleep_orders
        if orders is None:
            raise EngineUnavailableError(seat.engine.reason)
        ordered = asyncio.ensure_future(call(orders))
        lost = asyncio.ensure_future(seat.lost.wait())
        try:
            await asyncio.wait({ordered, lost}, return_when=asyncio.FIRST_COMPLETED)
            # The call of a closed channel is cancelled.
            if ordered.done() and not ordered.cancelled():
                return ordered.result()
            raise EngineUnavailableError("the engine was lost meanwhile")
        finally:
            ordered.cancel()
            lost.cancel()
            await asyncio.gather(ordered, lost, return_exceptions=True)
