"""Engines that share a card in virtual time: each takes and gives it back, one at a time."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.frontend.engine_client.messages import ModelInfo
from services.frontend.engine_client.swapper import SwapLimits, Swapper
from tests.support.virtual_time import run_virtually

SLEEP_S, WAKE_S = 0.5, 1.5
STEP_S = 0.1


@dataclass(eq=False)
class Engine:
    """An engine that takes and gives back the card, which only one may have."""

    name: str
    card: "Card"
    is_connected: bool = True
    is_asleep: bool = True
    reason: str = ""
    sleep_error: Exception | None = None
    wake_error: Exception | None = None
    hangs: bool = False
    modes: list[str] = field(default_factory=list)

    @property
    def info(self) -> ModelInfo | None:
        return ModelInfo(model=self.name) if self.is_connected else None

    @property
    def sleep_orders(self) -> "Orders | None":
        return Orders(self) if self.is_connected else None


class Orders:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def sleep(self, level: int, mode: str) -> None:
        self.engine.modes.append(mode)
        await self._pass(SLEEP_S)
        if self.engine.sleep_error is not None:
            raise self.engine.sleep_error
        self.engine.is_asleep = True
        self.engine.card.note()

    async def wake(self) -> None:
        assert all(each.is_asleep for each in self.engine.card.engines), "the card is taken"
        await self._pass(WAKE_S)
        if self.engine.wake_error is not None:
            raise self.engine.wake_error
        self.engine.is_asleep = False
        self.engine.card.note()

    async def has_memory(self) -> bool:
        return not self.engine.is_asleep

    async def _pass(self, seconds: float) -> None:
        if self.engine.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)


class Card:
    """Engines that share a card, and their swapper."""

    def __init__(self, *names: str, **limits: float) -> None:
        self.engines = [Engine(name, self) for name in names]
        self.swapper = Swapper(SwapLimits(**limits), clock=asyncio.get_running_loop().time)
        self.woken: list[str] = []
        """Models in the order in which they got the card."""
        self.changed = asyncio.Event()

    def note(self) -> None:
        awake = [each.name for each in self.engines if not each.is_asleep]
        assert len(awake) < 2, f"{awake} have the card"
        self.woken += [name for name in awake if self.woken[-1:] != [name]]
        self.changed.set()

    async def request(self, name: str, work_s: float, deadline_s: float | None = None) -> float:
        """Runs a request, which works while its model is awake; returns how long it waited."""
        asked_s = now()
        turn = self.swapper.ask(name)
        try:
            assert await turn.wait(deadline_s and time.monotonic() + deadline_s)
            waited_s = now() - asked_s
            engine = next(each for each in self.engines if each.name == name)
            while work_s > 0:
                await asyncio.sleep(STEP_S)
                assert engine.is_connected, "the engine was lost"
                if not engine.is_asleep:
                    work_s -= STEP_S
                    turn.has_progressed = True
            return waited_s
        finally:
            turn.end()

    async def prompt(self, name: str, prompt_s: float) -> None:
        """Runs a request whose prompt is computed again after each sleep."""
        turn = self.swapper.ask(name)
        assert await turn.wait(None)
        engine = next(each for each in self.engines if each.name == name)
        computed_s = 0.0
        while computed_s < prompt_s:
            await asyncio.sleep(STEP_S)
            computed_s = 0.0 if engine.is_asleep else computed_s + STEP_S
        turn.end()

    def start(self, name: str, work_s: float, **options: float) -> asyncio.Task[float]:
        return asyncio.create_task(self.request(name, work_s, **options))

    async def lose(self, engine: Engine, *, keeps_card: bool = False) -> None:
        """Breaks the connection; without `keeps_card`, the process is gone."""
        engine.is_connected = False
        engine.is_asleep = engine.is_asleep or not keeps_card
        self.swapper.note(engine)
        await asyncio.sleep(0)

    def find(self, engine: Engine) -> None:
        engine.is_connected, engine.hangs = True, False
        self.swapper.note(engine)


@asynccontextmanager
async def sharing(*names: str, connects: bool = True, **limits: float):
    card = Card(*names, **limits)
    running = asyncio.create_task(card.swapper.run(len(names)))
    if connects:
        for engine in card.engines:
            card.swapper.note(engine)
    try:
        yield card
        assert not any(card.swapper.num_waiting.values())
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()


def virtual(test):
    """Runs an async test in virtual time."""

    def run() -> None:
        run_virtually(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
