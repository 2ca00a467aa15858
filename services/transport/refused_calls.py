"""Refused calls: all are counted, and some are logged."""

import structlog

from services.transport.counts import Counts, Rate

LINES = Rate(per_s=1, capacity=10)
"""Lines that refused calls may write: callers without a key could fill the disk with more."""

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
