"""Counts and rates that limits are compared with; one interface for one or several processes."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How a token bucket fills."""

    per_s: float
    """Tokens that it gains per second."""
    capacity: float
    """Tokens that it holds at most."""


class Counts(Protocol):
    """Amounts held now and token buckets, each under a name.

    A name says what is counted and for whom, such as "connections" or "connections/192.0.2.1". The
    holder gives back what it took when it ends; no count waits for the garbage collector.
    """

    def take(self, name: str, amount: int = 1, *, limit: int | None) -> bool:
        """Adds to a count, unless that takes it over its limit.

        Args:
            name: the count's.
            amount: how much is added, at least 0.
            limit: the most that the count may reach; None sets no limit.

        Returns:
            Whether it was added.
        """

    def give_back(self, name: str, amount: int = 1) -> None:
        """Subtracts what `take` added."""

    def held(self, name: str) -> int:
        """Returns a count, 0 for a name that nothing is held under."""

    def draw(self, name: str, amount: float, *, rate: Rate, needs: float | None) -> float:
        """Draws tokens from a bucket, which starts full and gains tokens on the monotonic clock.

        Args:
            name: the bucket's.
            amount: tokens to draw; the bucket may end below 0. A negative amount puts tokens back.
            rate: how the bucket fills from now on.
            needs: tokens that the bucket must hold, else nothing is drawn; None draws always.

        Returns:
            0 if the tokens were drawn, else the tokens that the bucket lacks.
        """


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_s: float
    """When `level` was right."""
    full_s: float
    """When the bucket is full again."""


class LocalCounts:
    """The counts of one process.

    A count takes memory only while something is held under its name, a bucket only until some time
    after it is full again.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        """Starts with nothing held and every bucket full; `clock` returns monotonic seconds."""
        self._held: Counter[str] = Counter()
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._num_buckets_at_sweep = 1024

    def take(self, name: str, amount: int = 1, *, limit: int | None) -> bool:
        """Adds to a count, unless that takes it over its limit; see `Counts`."""
        if limit is not None and self.held(name) + amount > limit:
            return False
        self._held[name] += amount
        return True

    def give_back(self, name: str, amount: int = 1) -> None:
        """Subtracts what `take` added; see `Counts`."""
        assert self.held(name) >= amount, f"more was given back than taken: {name}"
        self._held[name] -= amount
        if not self._held[name]:
            del self._held[name]

    def held(self, name: str) -> int:
        """Returns a count; see `Counts`."""
        return self._held.get(name, 0)

    def draw(self, name: str, amount: float, *, rate: Rate, needs: float | None) -> float:
        """Draws tokens from a bucket; see `Counts`."""
        now_s = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            level = rate.capacity
        else:
            level = min(rate.capacity, bucket.level + (now_s - bucket.filled_s) * rate.per_s)
        if needs is not None and level < needs:
            return needs - level
        level = min(rate.capacity, level - amount)
        full_s = now_s + (rate.capacity - level) / rate.per_s
        self._buckets[name] = _Bucket(level, now_s, full_s)
        if len(self._buckets) > self._num_buckets_at_sweep:
            self._forget_full_buckets(now_s)
        return 0.0

    def _forget_full_buckets(self, now_s: float) -> None:
        self._buckets = {
            name: bucket for name, bucket in self._buckets.items() if bucket.full_s > now_s
        }
        self._num_buckets_at_sweep = max(1024, 2 * len(self._buckets))
