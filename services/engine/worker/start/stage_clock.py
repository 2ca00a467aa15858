"""Where the time of a start goes."""

import time
from collections.abc import Callable


class StageClock:
    """Times stages that follow each other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins the first stage."""
        self._clock = clock
        self._begun_s = self._ended_s = clock()
        self._stages: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Ends a stage; the next one begins."""
        now_s = self._clock()
        self._stages[f"{stage}_s"] = round(now_s - self._ended_s, 3)
        self._ended_s = now_s

    def seconds(self) -> dict[str, float]:
        """Returns the time of all stages that have ended, and of each, for a line of the log."""
        return {"start_s": round(self._ended_s - self._begun_s, 3), **self._stages}
