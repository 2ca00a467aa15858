"""The event loop's time under a test's control: a timeout passes when the test says so."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class LoopTime:
    """The time as the running event loop sees it, from here to its end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._real = loop.time
        self._ahead_s = 0.0
        self._stopped_s: float | None = None
        loop.time = self._now  # type: ignore[method-assign]

    def wind(self, seconds: float) -> None:
        """Lets time pass at once."""
        self._ahead_s += seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Lets no time pass inside the block, unless it is wound."""
        self._stopped_s = self._real()
        try:
            yield
        finally:
            self._ahead_s -= self._real() - self._stopped_s
            self._stopped_s = None

    def _now(self) -> float:
        return self._ahead_s + (self._real() if self._stopped_s is None else self._stopped_s)
