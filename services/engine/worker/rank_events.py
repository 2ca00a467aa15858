"""The events of the ranks while they serve: the reporter's in order, the others' at once.

The reporter is the first of the ranks that send results. If any rank is lost, the reporter's events
end with the error that explains it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from protos.engine.v1.worker_pb2 import WorkerEvent
from services.engine.batch import StepResult
from services.engine.worker.loss_cause import CAUSE_GRACE_S, cause_among
from services.engine.worker.rank_process import LostPeerError, WorkerDiedError
from services.engine.worker.remote_ranks import Rank

EventSink = Callable[[int, WorkerEvent], None]
"""Takes the number of a rank and an event that `next_event` does not return as it is."""


class RankEvents:
    """The events of the reporter: `open`, then `next_event`, then `close`."""

    def __init__(self, ranks: Sequence[Rank], reporters: Sequence[int], sink: EventSink) -> None:
        """Prepares to listen.

        Args:
            ranks: all, in order.
            reporters: numbers of the ranks that send results, in order. If there are several, the
                first one's results come with those of the others.
            sink: takes every event of the other ranks; results of the reporter too, if they must
                wait for those of others.
        """
        self._ranks = ranks
        self._reporters = reporters
        self._reporter = ranks[reporters[0]]
        self._sink = sink
        self._watches: list[asyncio.Task[WorkerDiedError]] = []
        self._joined: JoinedResults | None = None
        self._joining: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Listens to all ranks from now on; they take steps."""
        if len(self._reporters) > 1:
            self._joined = JoinedResults(self._reporters)
            self._joining = asyncio.create_task(self._join_results(self._joined))
        others = (each for each in range(len(self._ranks)) if each != self._reporters[0])
        self._watches = [asyncio.create_task(self._watch(number)) for number in others]

    def close(self) -> None:
        """Listens no more. May be called again."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.cancel()
        self._joined = None

    async def next_event(self) -> WorkerEvent:
        """Returns what the reporter says next.

        Raises:
            WorkerDiedError: a rank is gone; the error is the cause, if several are.
        """
        try:
            if self._joined is not None:
                return await self._joined.next_event()
            return await self._reporter.next_event()
        except LostPeerError as error:
            if not self._watches:
                raise
            done, _ = await asyncio.wait(
                self._watches, timeout=CAUSE_GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
            raise cause_among([*(task.result() for task in done), error]) from error

    async def _join_results(self, joined: "JoinedResults") -> None:
        """Listens to the reporter where its results need those of other data-parallel ranks."""
        number = self._reporters[0]
        try:
            while True:
                event = await self._reporter.next_event()
                if event.WhichOneof("event") == "result":
                    joined.put(number, event.result)
                    self._sink(number, event)
                else:
                    joined.pass_on(event)
        except WorkerDiedError as error:
            joined.pass_on(error)

    async def _watch(self, number: int) -> WorkerDiedError:
        """Listens to a rank other than the reporter; its end ends `next_event`."""
        rank = self._ranks[number]
        try:
            while True:
                event = await rank.next_event()
                is_result = event.WhichOneof("event") == "result"
                if is_result and self._joined is not None and number in self._reporters:
                    self._joined.put(number, event.result)
                self._sink(number, event)
        except LostPeerError as error:
            await asyncio.sleep(CAUSE_GRACE_S)
            self._reporter.interrupt(error)
            return error
        except WorkerDiedError as error:
            self._reporter.interrupt(error)
            return error


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
