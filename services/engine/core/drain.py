"""The end of an engine's life: it refuses new requests and finishes the live ones."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.engine.core.live_requests import LiveRequests

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How the requests ended that were live when a drain began."""

    num_finished: int
    num_aborted: int


class Drain:
    """Waits for the live requests, once it has begun."""

    def __init__(self, requests: LiveRequests, *, abort_all: Callable[[], None]) -> None:
        """Does not begin yet; `abort_all` ends the requests that a time limit leaves."""
        self.has_begun = False
        """Whether the engine only finishes its requests."""
        self.listeners: set[Callable[[], None]] = set()
        """Called when it begins."""
        self._requests = requests
        self._abort_all = abort_all
        self._is_over = asyncio.Event()

    async def run(self, timeout_s: float) -> DrainReport:
        """Waits at most `timeout_s` for live requests, then aborts the rest.

        A second run joins the first, with its own time limit.
        """
        num_live = len(self._requests)
        if not self.has_begun:
            self.has_begun = True
            log.info("drain_began", num_live=num_live, timeout_s=timeout_s)
            for listener in list(self.listeners):
                listener()
        num_aborted = 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._requests.wait_until_empty()
        except TimeoutError:
            num_aborted = len(self._requests)
            self._abort_all()
        log.info("drain_ended", num_finished=num_live - num_aborted, num_aborted=num_aborted)
        self._is_over.set()
        return DrainReport(num_live - num_aborted, num_aborted)

    async def wait_until_over(self) -> None:
        """Returns when a run has ended."""
        await self._is_over.wait()
