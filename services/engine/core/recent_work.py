"""How much an engine has computed lately, by which frontends balance engines."""

import math

from services.engine.scheduler.stats import SchedulerCounts

TIME_CONSTANT_S = 60.0
"""Age at which a token counts 1/e. Turns of a conversation come within about this time."""


class RecentWork:
    """Counts computed tokens, each of which counts less with its age.

    Tokens found in the prefix cache are not computed. Tokens between two readings count as if they
    were computed evenly: an engine may serve for hours before a frontend reads this.
    """

    def __init__(self, counts: SchedulerCounts, now_s: float) -> None:
        """Starts at nothing; reads `counts`, which only grow. Times are as in `read`."""
        self._counts = counts
        self._num_tokens = 0.0
        self._num_counted = _num_computed(counts)
        self._read_s = now_s

    def read(self, now_s: float) -> int:
        """Returns the count at `now_s`, in seconds of `time.monotonic()`."""
        num_computed = _num_computed(self._counts)
        age = (now_s - self._read_s) / TIME_CONSTANT_S
        mean_weight = -math.expm1(-age) / age if age > 0 else 1.0
        self._num_tokens *= math.exp(-age)
        self._num_tokens += mean_weight * (num_computed - self._num_counted)
        self._num_counted, self._read_s = num_computed, now_s
        return round(self._num_tokens)


def _num_computed(counts: SchedulerCounts) -> int:
    return counts.prompt_tokens - counts.cached_tokens + counts.output_tokens
