"""Refused calls: all are counted, and some are logged."""

import asyncio
import functools

import structlog

from services.transport.counts import Counts, Rate

LINES = Rate(per_s=1, capacity=10)
"""Lines that refused calls may write: callers without a key could fill the disk with more."""

MAX_HOST_CHARACTERS = 255
"""Characters of a refused host that are logged, as many as a name of DNS has."""

log = structlog.get_logger()


class RefusedCalls:
    """Records the calls that a service refuses before it knows their caller."""

    def __init__(self, counts: Counts) -> None:
        self.num_calls = 0
        """Calls that this process has refused."""
        self._counts = counts
        self._num_unlogged = 0

    def note(self, event: str = "call_refused", **facts: str) -> None:
        """Counts a call, and logs it unless many were logged just now."""
        self.num_calls += 1
        if self._counts.draw("lines of refused calls", 1, rate=LINES, needs=1):
            self._num_unlogged += 1
            return
        log.warning(event, num_unlogged=self._num_unlogged, **facts)
        self._num_unlogged = 0

    def note_host(self, host: str, **facts: str) -> None:
        """Counts an HTTP request to a host that is not answered, and logs it as `note` does."""
        self.note("host_refused", host=host[:MAX_HOST_CHARACTERS], **facts)


class RefusedElsewhere:
    """Passes refusals of another thread to the event loop whose calls are counted."""

    def __init__(self, refused: RefusedCalls) -> None:
        """Counts in the running event loop."""
        self._refused = refused
        self._loop = asyncio.get_running_loop()

    def note_host(self, host: str, **facts: str) -> None:
        """Counts and logs a request; see `RefusedCalls`."""
        note = functools.partial(self._refused.note_host, host, **facts)
        self._loop.call_soon_threadsafe(note)
