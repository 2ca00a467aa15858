"""Requests' turns at models that share a card: they run while their model is awake, or wait."""

import asyncio
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from services.frontend.engine_client.messages import ModelInfo
from services.frontend.engine_client.sleep_orders import SleepOrders
from services.frontend.errors import DeadlineExpiredError, OverloadedError

RETRY_MS = 1000
"""Advice to callers that a full queue refuses."""


class SharingEngine(Protocol):
    """An engine whose card others share; EngineClient."""

    @property
    def info(self) -> ModelInfo | None:
        """Its model; None without a connection."""

    @property
    def is_connected(self) -> bool:
        """Whether it has a session."""

    @property
    def is_asleep(self) -> bool:
        """Whether its last heartbeat said so."""

    @property
    def reason(self) -> str:
        """Why it gets no requests now."""

    @property
    def sleep_orders(self) -> SleepOrders | None:
        """Orders about its sleep; None without a connection."""


class Phase(Enum):
    """The state of an engine, as far as the card is concerned."""

    UNKNOWN = "unknown"
    """To be asked: newly connected, or an order failed."""
    AWAKE = "awake"
    """It takes requests."""
    CLOSING = "closing"
    """It is awake for its running requests; new ones wait."""
    ASLEEP = "asleep"
    CHANGING = "changing"
    """It falls asleep or wakes."""


class Seat:
    """One engine of the card, with the turns at its model."""

    def __init__(
        self, name: str, engine: SharingEngine, *, now_s: float, on_end: Callable[[], None]
    ) -> None:
        """Starts without a connection; `on_end` is called when a turn ends."""
        self.name = name
        self.engine = engine
        self.on_end = on_end
        self.phase = Phase.UNKNOWN
        self.lost = asyncio.Event()
        """Set while the engine has no session."""
        self.lost.set()
        self.waiting: dict[Turn, None] = {}
        """Turns that wait, the oldest first."""
        self.running: set[Turn] = set()
        """Turns that have begun. While the engine sleeps, their requests are kept there."""
        self.since_s = now_s
        """Begin of the present phase, or of the loss of the engine."""
        self.woke_s = now_s
        """Begin of the present time with the card."""
        self.num_vain_turns = 0
        """Times with the card, in a row, in which the oldest request got no token: its prompt takes
        longer than a turn, and is computed again in each."""
        self.retry_at_s = 0.0
        """Earliest time of the next order, after failed ones."""
        self.num_failures = 0
        """Orders that failed in a row."""
        self.ask_at_s = 0.0
        """Earliest time of the next question for its state."""

    @property
    def is_connected(self) -> bool:
        """Whether the engine has a session."""
        return not self.lost.is_set()

    @property
    def demand_since_s(self) -> float | None:
        """Since when requests want the model to be awake; None without any."""
        times = [turn.asked_s for turn in list(self.waiting)[:1]]
        if self.running and self.phase is Phase.ASLEEP:
            times.append(self.since_s)
        return min(times, default=None)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Begins a phase; AWAKE begins all turns that wait."""
        if phase is Phase.AWAKE and self.phase not in (Phase.AWAKE, Phase.CLOSING):
            self.woke_s = now_s
            for turn in self.running:
                turn.has_progressed = False
        if phase is not self.phase:
            self.phase, self.since_s = phase, now_s
        if phase is Phase.AWAKE:
            for turn in list(self.waiting):
                turn.begin(now_s)

    def count_vain_turn(self) -> None:
        """Notes, as the model falls asleep, whether its oldest request has got on."""
        oldest = min(self.running, key=lambda turn: turn.asked_s, default=None)
        was_vain = (
            oldest is not None and not oldest.has_progressed and oldest.begun_s <= self.woke_s
        )
        self.num_vain_turns = self.num_vain_turns + 1 if was_vain else 0

    def fail_waiting(self, error: Exception) -> None:
        """Ends all turns that wait with an error."""
        for turn in list(self.waiting):
            turn.fail(error)


class Turn:
    """One request's turn at its model: it waits, then runs until `end`."""

    def __init__(self, seat: Seat, *, asked_s: float) -> None:
        """Begins at once if the model is awake and takes requests, else waits."""
        self.asked_s = asked_s
        self.begun_s = asked_s
        self.has_progressed = False
        """Whether the request got a token since its model woke."""
        self._seat = seat
        self._begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        seat.waiting[self] = None
        if seat.phase is Phase.AWAKE:
            self.begin(asked_s)

    async def wait(self, deadline_s: float | None) -> bool:
        """Waits until the turn begins; returns False if it was ended before.

        Args:
            deadline_s: of the request, by the monotonic clock; None without one.

        Raises:
            DeadlineExpiredError: the deadline passed first.
            FrontendError: the model cannot be woken.
        """
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await self._begun
        except TimeoutError:
            self.end()
            raise DeadlineExpiredError(
                f"the request's deadline passed while it waited for the model {self._seat.name!r}, "
                "which shares its card"
            ) from None
        except BaseException:
            self.end()
            raise

    def begin(self, now_s: float) -> None:
        """Lets the request run."""
        self.begun_s = now_s
        self._seat.waiting.pop(self, None)
        if not self._begun.done():
            self._seat.running.add(self)
            self._begun.set_result(True)

    def fail(self, error: Exception) -> None:
        """Ends a turn that waits with an error."""
        self._seat.waiting.pop(self, None)
        if not self._begun.done():
            self._begun.set_exception(error)

    def end(self) -> None:
        """Ends the turn, begun or not; may be called again."""
        self._seat.waiting.pop(self, None)
        self._seat.running.discard(self)
        if not self._begun.done():
            self._begun.set_result(False)
        self._seat.on_end()


def check_room(seat: Seat, limit: int) -> None:
    """Raises OverloadedError if as many requests wait for a model as may."""
    if seat.phase is not Phase.AWAKE and len(seat.waiting) >= limit:
        raise OverloadedError(
            f"{len(seat.waiting)} requests wait for the model {seat.name!r}, which shares its card:"
            " no more may (--swap-max-waiting); try again later",
            retry_after_ms=RETRY_MS,
        )
