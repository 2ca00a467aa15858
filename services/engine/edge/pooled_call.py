"""One call for vectors, with one request for each prompt."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc

from protos.engine.v1.engine_pb2 import Submit
from services.engine.batch import Float32Array, read_float32
from services.engine.edge.edge import Edge
from services.engine.edge.status import count_rejection
from services.engine.errors import EngineError, EngineUnavailableError
from services.engine.request import OutputSink, Request, RequestOutput
from services.telemetry.trace_context import read_traceparent

MAX_IN_FLIGHT = 64
"""Prompts of a call that the core has at a time, so that it leaves room in the queue."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The vector of a prompt, and what it cost."""

    vector: Float32Array
    num_tokens: int
    num_cached_tokens: int


class PooledCall(OutputSink):
    """Serves one call and is the sink of its requests, whose handles are their indices."""

    def __init__(self, edge: Edge, context: grpc.aio.ServicerContext) -> None:
        self._core = edge.core
        self._reader = edge.reader
        self.context = context
        self._live: dict[int, tuple[Request, asyncio.Future[RequestOutput]]] = {}
        self._is_aborted = False

    def put(self, output: RequestOutput) -> None:
        """Takes a request's only output."""
        _, future = self._live.pop(output.request.handle)
        if not future.done():
            future.set_result(output)

    def flush(self) -> None:
        """Does nothing: each output is all of its request's."""

    def abort(self) -> None:
        """Ends the requests early."""
        self._is_aborted = True
        for request, _ in list(self._live.values()):
            self._core.abort(request)

    async def run(self, prompts: Callable[[], Iterable[Submit]]) -> Sequence[PooledPrompt]:
        """Returns the vectors of prompts, in order.

        Args:
            prompts: returns them, without handle, time limit and traceparent, which come from the
                call. They are read twice, as all may take much more memory than the call's message:
                first to refuse the call before any runs, then as there is room for each.

        Raises:
            EngineError: the call was refused or aborted, or a request failed.
        """
        try:
            self._core.check_ready()
            count = 0
            for count, each in enumerate(prompts(), start=1):
                self._read(count - 1, each)
                await asyncio.sleep(0)  # outputs of others go out meanwhile
        except EngineError as error:
            count_rejection(self._core.counters, error)
            raise
        results: dict[int, PooledPrompt] = {}
        remaining = enumerate(prompts())

        async def work() -> None:
            for number, each in remaining:
                results[number] = await self._vector(self._read(number, each))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(MAX_IN_FLIGHT, count)):
                    tasks.create_task(work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self.abort()
        return [results[each] for each in range(count)]

    def _read(self, number: int, submit: Submit) -> Request:
        """Returns the request of a prompt, or refuses it."""
        timeout_s = self.context.time_remaining()
        submit.handle, submit.pool = number, True
        submit.traceparent = read_traceparent(self.context.invocation_metadata())
        if timeout_s is not None:
            submit.timeout_ms = max(0, int(timeout_s * 1000))
        return self._reader.from_submit(submit, self, self._reader.session_images())

    async def _vector(self, request: Request) -> PooledPrompt:
        """Submits one request and waits for its vector."""
        if self._is_aborted:
            raise EngineUnavailableError("the caller gave the request up")
        future = asyncio.get_running_loop().create_future()
        self._live[request.handle] = request, future
        try:
            self._core.submit(request)
        except EngineError as error:
            count_rejection(self._core.counters, error)
            raise
        output = await future
        if output.error is not None:
            raise output.error
        if not output.vector:
            raise EngineUnavailableError("the caller gave the request up")
        vector = read_float32(output.vector)
        return PooledPrompt(vector, request.num_prompt_tokens, request.num_cached_tokens)
