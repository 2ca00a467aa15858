"""A pause between two steps of a loop, for an order to the worker."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from services.engine.worker.rank_orders import RankOrders
from services.engine.worker.rank_process import WorkerDiedError


class OrderChannel(Protocol):
    """The part of an executor that carries out orders."""

    @property
    def orders(self) -> RankOrders:
        """Orders that every rank answers, for times when no step runs."""


class StepPause:
    """Keeps a step loop from ordering steps while a caller holds it.

    Requests stay in the scheduler: running ones keep their rows and blocks, new ones are admitted
    to its queue, and aborts, deadlines and the limit of the queue work as always. The age of a step
    does not count meanwhile, so a holder gives its order a time limit of its own.
    """

    def __init__(self, channel: OrderChannel, wake: Callable[[], None]) -> None:
        """Starts without a holder.

        Args:
            channel: the worker.
            wake: has the loop look again whether it may order steps.
        """
        self._channel = channel
        self._wake = wake
        self._turn = asyncio.Lock()
        self._reached: asyncio.Future[None] | None = None
        self._has_ended = False
        self.is_late = False
        """Whether a holder has given up waiting for the worker, which then counts as hung."""

    @property
    def is_wanted(self) -> bool:
        """Whether the loop must not order another step."""
        return self._reached is not None

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[RankOrders]:
        """Pauses the loop for the length of the block, which begins once no step is in flight.

        Every step that was ordered has its result by then, and its tokens are published. Holders
        take turns. The block gets the orders to all ranks; they fail if the worker is lost. If the
        block raises TimeoutError, the worker counts as hung, and is replaced.

        Raises:
            WorkerDiedError: the worker was lost before the block began.
        """
        async with self._turn:
            if self._has_ended:
                raise WorkerDiedError("the worker was lost before its steps had paused")
            self._reached = asyncio.get_running_loop().create_future()
            self._wake()
            try:
                await self._reached
                yield self._channel.orders
            except TimeoutError:
                self.is_late = True
                raise
            finally:
                self._reached = None
                self._wake()

    def reach(self) -> None:
        """Begins the holder's block, if there is one: no step is in flight."""
        if self._reached is not None and not self._reached.done():
            self._reached.set_result(None)

    def fail(self) -> None:
        """Ends the waits of holders: the loop has ended."""
        self._has_ended = True
        if self._reached is not None and not self._reached.done():
            self._reached.set_exception(
                WorkerDiedError("the worker was lost before its steps had paused")
            )
