"""Puts engines to sleep and wakes them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import grpc

from protos.engine.v1.engine_pb2 import GetStatsRequest, GetStatsResponse
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.engine.v1.operator_pb2 import SleepMode, SleepRequest, WakeRequest
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.frontend.engine_client.adapter_orders import answer_of
from services.frontend.errors import EngineUnavailableError

CALL_TIMEOUT_S = 5.0
NOTICE_S = 5.0
"""Longest wait for the heartbeat of an engine that woke."""
NOTICE_POLL_S = 0.02
MODES = {
    "wait": SleepMode.SLEEP_MODE_WAIT,
    "recompute": SleepMode.SLEEP_MODE_RECOMPUTE,
    "abort": SleepMode.SLEEP_MODE_ABORT,
}
"""The fates of live requests."""
_UNSERVED = "the engine was started without --enable-sleep"


class SleepOrders:
    """Orders to one engine about its sleep."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._operator = OperatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        self._stub = EngineServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code

    async def sleep(self, level: int, mode: str) -> None:
        """Puts the engine to sleep, with one of MODES; returns once its memory is free.

        Raises:
            FrontendError, EngineFaultError: it stays awake, with its reason.
        """
        request = SleepRequest(level=level, mode=MODES[mode])
        await _call(lambda: self._operator.Sleep(request))

    async def wake(self) -> None:
        """Wakes the engine.

        Raises:
            FrontendError, EngineFaultError: it stays asleep, with its reason.
        """
        await _call(lambda: self._operator.Wake(WakeRequest()))

    async def is_asleep(self) -> bool:
        """Returns whether the engine sleeps; raises FrontendError if it does not say so."""
        return bool((await self._stats()).sleep_level)

    async def has_memory(self) -> bool:
        """Returns whether the engine has its memory, or is about to take or give it back.

        Raises:
            FrontendError: it does not say so.
        """
        return (await self._stats()).sleep_state != "asleep"

    async def _stats(self) -> GetStatsResponse:
        stats: GetStatsResponse = await _call(
            lambda: self._stub.GetStats(GetStatsRequest(), timeout=CALL_TIMEOUT_S)
        )
        return stats


class Sleeping(Protocol):
    """An engine that may sleep; EngineClient."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""

    @property
    def sleep_orders(self) -> SleepOrders | None:
        """Orders about its sleep; None without a connection."""


async def sleep_all(engines: Iterable[Sleeping], level: int, mode: str) -> None:
    """Puts all connected engines to sleep, with one of MODES.

    Raises:
        EngineUnavailableError: none is connected.
        FrontendError, EngineFaultError: one stays awake, with its reason; others sleep.
    """
    await _order_all(engines, lambda orders: orders.sleep(level, mode))


async def wake_all(engines: Iterable[Sleeping]) -> None:
    """Wakes all connected engines, and returns once they take requests.

    Raises:
        EngineUnavailableError: none is connected.
        FrontendError, EngineFaultError: one stays asleep, with its reason; others are awake.
    """
    woken = [each for each in engines if each.sleep_orders is not None]
    await _order_all(woken, lambda orders: orders.wake())
    try:
        async with asyncio.timeout(NOTICE_S):
            while not all(each.is_ready for each in woken):  # noqa: ASYNC110  heartbeats say it
                await asyncio.sleep(NOTICE_POLL_S)
    except TimeoutError:
        return  # it is awake, and not ready for another reason


async def are_asleep(engines: Iterable[Sleeping]) -> bool:
    """Returns whether all connected engines sleep."""
    return all(await _order_all(engines, lambda orders: orders.is_asleep()))


async def _order_all(
    engines: Iterable[Sleeping], order: Callable[[SleepOrders], Awaitable[Any]]
) -> list[Any]:
    """Gives all connected engines an order at the same time; raises the first error."""
    connected = [each.sleep_orders for each in engines if each.sleep_orders is not None]
    if not connected:
        raise EngineUnavailableError("no engine is connected")
    answers = await asyncio.gather(*map(order, connected), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


async def _call(call: Callable[[], Awaitable[Any]]) -> Any:
    return await answer_of(call, unserved=_UNSERVED)
