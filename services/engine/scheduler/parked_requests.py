"""Requests that wait for blocks from disk before they wait for their turn."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from services.engine.request import Request

UNMEASURED_LIMIT_S = 10.0
"""Longest wait for the disk before the time of computing a prompt is known."""


@dataclass(slots=True)
class _Parked:
    entries: set[bytes]
    until_s: float


class ParkedRequests:
    """Waiting requests by the blocks that they still want from disk.

    A request leaves when all of its reads have ended, or after the time that computing the tokens
    would take.
    """

    def __init__(self) -> None:
        self._parked: dict[Request, _Parked] = {}

    def __len__(self) -> int:
        """Requests that wait for the disk."""
        return len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests."""
        return iter(self._parked)

    @property
    def until_s(self) -> float | None:
        """The time when the next request stops to wait; None without any."""
        return min((each.until_s for each in self._parked.values()), default=None)

    def park(self, request: Request, entries: Iterable[bytes], *, until_s: float) -> None:
        """Adds a request that waits for reads until a time at most."""
        self._parked[request] = _Parked(set(entries), until_s)

    def discard(self, request: Request) -> bool:
        """Removes a request that ends; returns whether it was here."""
        return self._parked.pop(request, None) is not None

    def end_reads(self, entries: Collection[bytes]) -> list[Request]:
        """Notes ended reads; removes and returns the requests that wait for no other."""
        for parked in self._parked.values():
            parked.entries.difference_update(entries)
        return self._take(request for request, each in self._parked.items() if not each.entries)

    def take_late(self, now_s: float) -> list[Request]:
        """Removes and returns the requests that have waited long enough."""
        return self._take(r for r, each in self._parked.items() if each.until_s <= now_s)

    def _take(self, requests: Iterable[Request]) -> list[Request]:
        taken = list(requests)
        for request in taken:
            del self._parked[request]
        return taken
