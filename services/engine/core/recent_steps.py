"""The latest steps: when each ended, and how much it computed."""

from dataclasses import dataclass

import numpy as np

MAX_STEPS = 2**16
"""Steps remembered, 2.5 MiB: minutes of the fastest ones."""
_FIELDS = np.dtype(
    [("step_id", "<i8"), ("at_s", "<f8"), ("num_tokens", "<i4"), ("batch_size", "<i4")]
)


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest time between the ends of two steps."""

    step_id: int
    """The later one."""
    seconds: float
    num_tokens: int
    """Query tokens of the later one, over all requests."""
    batch_size: int
    """Its requests."""


class RecentSteps:
    """A ring of the latest steps of one worker after the other."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        """Remembers nothing yet."""
        self._steps = np.zeros(max_steps, _FIELDS)
        self._num_steps = 0

    def add(self, step_id: int, at_s: float, *, num_tokens: int, batch_size: int) -> None:
        """Adds a step that ended at `at_s`, in seconds of `time.monotonic()`."""
        self._steps[self._num_steps % len(self._steps)] = (step_id, at_s, num_tokens, batch_size)
        self._num_steps += 1

    def longest_gap(self, start_s: float, end_s: float) -> Gap | None:
        """Returns the longest gap between steps that ended from `start_s` to `end_s`.

        None if fewer than two of them are remembered.
        """
        steps = self._steps[: self._num_steps]
        steps = steps[(steps["at_s"] >= start_s) & (steps["at_s"] <= end_s)]
        if len(steps) < 2:
            return None
        steps = np.sort(steps, order="at_s")
        gaps = np.diff(steps["at_s"])
        at = int(gaps.argmax())
        later = steps[at + 1]
        return Gap(
            step_id=int(later["step_id"]),
            seconds=float(gaps[at]),
            num_tokens=int(later["num_tokens"]),
            batch_size=int(later["batch_size"]),
        )
