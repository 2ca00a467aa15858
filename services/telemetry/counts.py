"""Counts that limits are compared with, behind one interface that several processes can share."""

from collections import Counter
from typing import Protocol


class Counts(Protocol):
    """What is held now, by name: places, connections, bytes.

    A name says what is counted and for whom, such as "connections" or "connections/192.0.2.1".
    What was taken is given back when its holder ends; no count waits for the garbage collector.
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


class LocalCounts:
    """The counts of one process. A name takes memory only while something is held under it."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

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
