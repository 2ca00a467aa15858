"""Requests that wait for blocks and a row."""

import heapq
import math
from collections.abc import Iterator
from itertools import chain

from services.engine.request import Request


def rank_s(now_s: float, priority: int, priority_ageing_s: float) -> float:
    """Returns the arrival time that a request counts as: earlier with higher priority.

    Priority p is worth log2(1 + p) * priority_ageing_s of waiting: with the default 10 s for
    priority 1 and 67 s for 100. The order of waiting requests never changes, since all age alike.
    """
    lead = math.copysign(math.log2(1 + abs(priority)), priority)
    return now_s - lead * priority_ageing_s


def service_order(request: Request) -> tuple[bool, float, int]:
    """Returns the sort key of the service order: by rank, then by arrival.

    Suspects come first: all others wait until each has run alone.
    """
    return (not request.is_suspect, request.rank_s, request.arrival_index)


class WaitingQueue:
    """Waiting requests in service order and in order of arrival.

    A preempted request keeps its arrival, so it comes before all later arrivals.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        """By arrival index."""
        # Both heaps may hold stale entries: of requests that no longer wait or changed rank.
        # They go when they surface or become the majority: constant time on average, while
        # removing from the middle costs a search.
        self._by_rank: list[tuple[tuple[bool, float, int], Request]] = []
        self._by_arrival: list[int] = []
        self._held: dict[int, Request] | None = None
        """New requests while these are held, by arrival index."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + len(self._held or ())

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests, in no order."""
        return chain(self._waiting.values(), (self._held or {}).values())

    def hold_new(self) -> None:
        """Keeps requests that have never run from being next, later ones included."""
        self._held = {}
        for request in [each for each in self._waiting.values() if each.started is None]:
            self.discard(request)
            self._held[request.arrival_index] = request

    def release_new(self) -> None:
        """Ends `hold_new`, if it was called."""
        held, self._held = self._held or {}, None
        for request in held.values():
            self.push(request)

    def push(self, request: Request) -> None:
        """Adds a request with an arrival index and a rank."""
        if self._held is not None and request.started is None:
            self._held[request.arrival_index] = request
            return
        self._waiting[request.arrival_index] = request
        heapq.heappush(self._by_rank, (service_order(request), request))
        heapq.heappush(self._by_arrival, request.arrival_index)

    def peek(self) -> Request | None:
        """Returns the request that is next, or None if no request waits."""
        while self._by_rank and not self._is_current(self._by_rank[0]):
            heapq.heappop(self._by_rank)
        return self._by_rank[0][1] if self._by_rank else None

    def oldest(self) -> Request | None:
        """Returns the waiting request that arrived first, or None if no request waits."""
        while self._by_arrival and self._by_arrival[0] not in self._waiting:
            heapq.heappop(self._by_arrival)
        return self._waiting[self._by_arrival[0]] if self._by_arrival else None

    def promote(self, request: Request, rank_s: float) -> None:
        """Gives a waiting request an earlier rank."""
        request.rank_s = rank_s
        heapq.heappush(self._by_rank, (service_order(request), request))

    def pop(self) -> Request:
        """Removes and returns the request that is next."""
        request = self.peek()
        assert request is not None, "no request waits"
        self.discard(request)
        return request

    def discard(self, request: Request) -> None:
        """Removes a waiting request."""
        if self._held is not None and self._held.pop(request.arrival_index, None) is not None:
            return
        del self._waiting[request.arrival_index]
        most = 2 * len(self._waiting)
        if len(self._by_rank) > most:
            self._by_rank = list(filter(self._is_current, self._by_rank))
            heapq.heapify(self._by_rank)
        if len(self._by_arrival) > most:
            self._by_arrival = sorted(self._waiting)  # which is a heap, too

    def _is_current(self, entry: tuple[tuple[bool, float, int], Request]) -> bool:
        """Whether an entry's request still waits with this rank."""
        (_, rank, index), request = entry
        return self._waiting.get(index) is request and request.rank_s == rank
