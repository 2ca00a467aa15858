"""Joins the results that data-parallel ranks send of one step."""

import asyncio
from collections import deque
from collections.abc import Iterable

from protos.engine.v1.worker_pb2 import WorkerEvent
from services.engine.batch import StepResult


class JoinedResults:
    """The events of the first rank; its results come once all ranks have sent theirs."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Starts without events.

        Args:
            ranks: numbers of the ranks that send results, in order.
        """
        self._results: dict[int, deque[StepResult]] = {rank: deque() for rank in ranks}
        self._events: asyncio.Queue[WorkerEvent | Exception] = asyncio.Queue()

    def put(self, rank: int, result: StepResult) -> None:
        """Takes a rank's next result; each rank sends one for every step, in order."""
        self._results[rank].append(result)
        if all(self._results.values()):
            first, *others = (results.popleft() for results in self._results.values())
            first.across_dp.extend(others)
            self._events.put_nowait(WorkerEvent(result=first))

    def pass_on(self, event: WorkerEvent | Exception) -> None:
        """Takes another event of the first rank, or what ends `next_event`."""
        self._events.put_nowait(event)

    async def next_event(self) -> WorkerEvent:
        """Returns the next event, or raises the error that was passed on."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event
