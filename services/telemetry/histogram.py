"""Counts of observations by size."""

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""From one step of a small model to the longest answer, in seconds."""
TOKEN_BOUNDS = tuple(2.0**power for power in range(18))


class Histogram:
    """Buckets with fixed upper bounds; `observe` costs one binary search.

    Not prometheus_client's: that one takes a lock and walks the buckets for each observation, and
    cannot take a thousand equal ones at once.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Starts empty.

        Args:
            bounds: inclusive upper bounds, ascending; a last bucket without one is added.
        """
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts `count` observations of one value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count
