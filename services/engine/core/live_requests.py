"""The live requests: their ids, timers and output."""

import asyncio
import time
from collections.abc import Callable

from services.engine.core.recent_requests import RecentRequests, RequestStory
from services.engine.core.request_ends import RequestEnds
from services.engine.core.sink_shares import SinkShares
from services.engine.errors import DuplicateRequestError, EngineError
from services.engine.request import FinishReason, OutputSink, Request, RequestOutput
from services.engine.scheduler.step_outputs import StepOutputs


class LiveRequests:
    """Holds every live request by its id and ends each exactly once."""

    def __init__(self, ends: RequestEnds, on_deadline: Callable[[Request], None]) -> None:
        self._ends = ends
        self._on_deadline = on_deadline
        self._requests: dict[str, Request] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._became_empty = asyncio.Event()
        self._shares: dict[int, SinkShares] = {}
        """The last shares of each column of a step, by its index."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def recent(self) -> RecentRequests:
        """The requests that ended lately, and the latest steps."""
        return self._ends.recent

    def story(self, request_id: str) -> RequestStory | None:
        """Returns the story of a live or a recent request, None of an unknown one."""
        if (request := self._requests.get(request_id)) is not None:
            return RequestStory.of(request, time.monotonic())
        return self.recent.find(request_id)

    def all(self) -> list[Request]:
        """Returns the live requests, oldest first."""
        return list(self._requests.values())

    def check_is_new(self, request_id: str) -> None:
        """Raises DuplicateRequestError if a live request has this id."""
        if request_id in self._requests:
            raise DuplicateRequestError(f"request_id {request_id!r} belongs to a live request")

    def add(self, request: Request) -> None:
        """Takes a request and starts its timer."""
        self._requests[request.request_id] = request
        self._became_empty.clear()
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            delay_s = max(0.0, request.deadline_s - time.monotonic())
            timer = loop.call_later(delay_s, self._on_deadline, request)
            self._timers[request.request_id] = timer

    def publish(self, outputs: StepOutputs) -> None:
        """Puts one step's outputs into their sinks and flushes each sink once."""
        sinks: set[OutputSink] = set()
        for index, column in enumerate(outputs.columns):
            shares = self._shares.get(index)
            if shares is None or shares.requests is not column.requests:
                shares = self._shares[index] = SinkShares(column.requests)
            sinks |= shares.put(column.token_ids)
        for output in outputs.others:
            output.request.sink.put(output)
            sinks.add(output.request.sink)
        for sink in sinks:
            sink.flush()
        for output in outputs.others:
            if output.is_last:
                self._forget(output)

    def end(self, request: Request, reason: FinishReason | None, error: EngineError | None) -> None:
        """Ends a live request whose steps have no more output for it."""
        output = RequestOutput(request, [], finish_reason=reason, error=error)
        self.publish(StepOutputs(others=[output]))

    async def wait_until_empty(self) -> None:
        """Returns when no request is live."""
        if self._requests:
            await self._became_empty.wait()

    def _forget(self, output: RequestOutput) -> None:
        request = output.request
        self._shares.clear()  # they may have it
        del self._requests[request.request_id]
        if timer := self._timers.pop(request.request_id, None):
            timer.cancel()
        request.release()
        self._ends.record(output)
        if not self._requests:
            self._became_empty.set()
