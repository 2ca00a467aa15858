"""Counts live HTTP requests and ends them early."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from services.frontend.errors import EngineUnavailableError, OverloadedError
from services.transport.counts import Counts

_PLACES = "http/requests"


class LiveRequests:
    """Runs requests until they end, their clients leave, or the frontend stops."""

    def __init__(self, counts: Counts, *, max_requests: int) -> None:
        """Allows `max_requests` at a time."""
        self._counts = counts
        self._max_requests = max_requests
        self._open: set[object] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._running: set[asyncio.Task[None]] = set()
        self.is_draining = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """Counts a request, from before its body is read to its end.

        Raises:
            EngineUnavailableError: the frontend is draining.
            OverloadedError: too many requests are unfinished.
        """
        if self.is_draining:
            raise _going_down()
        if not self._counts.take(_PLACES, limit=self._max_requests):
            raise OverloadedError(
                f"{self._counts.held(_PLACES)} requests are unfinished; the limit is"
                f" {self._max_requests}",
                retry_after_ms=None,
            )
        request = object()
        self._open.add(request)
        self._is_idle.clear()
        try:
            yield
        finally:
            self._counts.give_back(_PLACES)
            self._open.discard(request)
            if not self._open:
                self._is_idle.set()

    async def run(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Runs a request after its body was read.

        Raises:
            ClientDisconnect: the client left; the work was cancelled.
            EngineUnavailableError: the frontend stopped; the work was cancelled.
        """
        running = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        self._running.add(running)
        try:
            await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientDisconnect
            if running.cancelled():
                raise _going_down()
            running.result()
        finally:
            gone.cancel()
            running.cancel()
            await asyncio.wait({running})
            self._running.discard(running)
            # The error's traceback refers to this frame. Together with the task, which refers to
            # the error, it would keep the body until the garbage collector runs.
            del running, gone

    async def wait_idle(self) -> None:
        """Waits until no request is left."""
        await self._is_idle.wait()

    def end(self) -> None:
        """Ends all running requests."""
        for running in self._running:
            running.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _going_down() -> EngineUnavailableError:
    return EngineUnavailableError("the frontend is going down")
