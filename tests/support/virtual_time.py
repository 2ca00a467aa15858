"""An event loop whose time passes at once: it jumps to the next timer when nothing else is left."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # chosen by the system
    """Finds events that are there, and lets the time pass that it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left that could happen"
        self.passed_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs code that only waits for timers and for itself."""

    def __init__(self) -> None:
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self) -> float:
        """Returns the seconds that have passed."""
        return self._passing.passed_s


def run_virtually(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Runs a scenario in virtual time; one that waits for something that cannot happen fails."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)
