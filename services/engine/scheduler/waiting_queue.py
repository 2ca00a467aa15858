"""Requests that wait for blocks and a row."""

import heapq

from services.engine.request import Request, RequestStatus


def rank_s(now_s: float, priority: int, priority_ageing_s: float) -> float:
    """Returns the moment as which an arrival now counts: earlier, the higher the priority.

    All requests that wait gain rank at the same rate, so their order never changes while they do:
    one of priority p comes behind others of priority q > p only if those arrive within
    (q - p) * priority_ageing_s of it. That bounds how long anybody is overtaken.
    """
    return now_s - priority * priority_ageing_s


def service_order(request: Request) -> tuple[bool, float, int]:
    """Sorts requests into the order in which they are served: by rank, then by arrival.

    Suspects come before all others, who wait until each of them has run alone.
    """
    return (not request.is_suspect, request.rank_s, request.arrival_index)


class WaitingQueue:
    """Hands out waiting requests in service order.

    A request that was preempted keeps its arrival and so comes before all that arrived later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[bool, float, int], Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def push(self, request: Request) -> None:
        """Adds a request whose status is WAITING."""
        heapq.heappush(self._heap, (service_order(request), request))
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """Returns the request that is next, or None when nobody waits."""
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Removes and returns the request that is next."""
        request = self.peek()
        assert request is not None, "nobody waits"
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return request

    def discard(self, request: Request) -> None:
        """Removes a request that waited and is FINISHED now."""
        assert request.status is RequestStatus.FINISHED, "it would be handed out all the same"
        self._num_waiting -= 1
        # Its entry stays in the heap until it comes up, or until such entries are the majority:
        # constant time on average, where taking it out of the middle would cost a search.
        if len(self._heap) > 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
