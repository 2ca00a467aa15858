"""One Generate call of a foreign protocol, with one request per output."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from protos.engine.v1.engine_pb2 import GenerateRequest
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.open_streams import write_in_time
from services.engine.edge.request_reader import RequestReader
from services.engine.edge.status import count_rejection
from services.engine.edge.stop_strings import StopRule, StopStrings
from services.engine.errors import DuplicateRequestError, EngineError, EngineUnavailableError
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.request import OutputSink, Request, RequestOutput
from services.telemetry.trace_context import read_traceparent


class CallOutput(Protocol):
    """Collects one output until it is written."""

    request: Request
    is_told: bool
    """Whether the ending was written."""

    @property
    def is_over(self) -> bool:
        """Whether the output is complete; its request may still run."""

    def take(self, output: RequestOutput) -> None:
        """Takes one step's output; ignores it after the end."""

    def responses(self) -> Sequence[Any]:
        """Returns the messages to write now."""


class CallMessage(Protocol):
    """One message of a foreign protocol that asks for output."""

    @property
    def stop_rule(self) -> StopRule | None:
        """The stop strings, if there are some."""

    def samples(self, *, max_model_len: int) -> Iterator[GenerateRequest]:
        """Yields one request of the engine's own protocol per output, or refuses the message."""

    def output(self, request: Request, stop_strings: StopStrings | None) -> CallOutput:
        """Returns the collector of an output of a request that this message made."""

    def failure(self, error: EngineError) -> Any | None:
        """Returns the last message of an accepted request that failed; None makes it a status."""


class ForeignCall(OutputSink):
    """Serves one call and is the sink of its requests, whose handles are their indices.

    Unread output is merged; the context length bounds it.
    """

    def __init__(
        self,
        core: EngineCore,
        reader: RequestReader,
        config: EngineConfig,
        context: grpc.aio.ServicerContext,
        grammars: GrammarCompiler,
    ) -> None:
        self._core = core
        self._reader = reader
        self._timeout_s = config.serving.slow_reader_timeout_s
        self.context = context
        self._grammars = grammars
        self._outputs: list[CallOutput] = []
        self._error: EngineError | None = None
        self._is_aborted = False
        self._wake = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Takes one step's output of one request."""
        target = self._outputs[output.request.handle]
        if not target.is_over:
            self._error = self._error or output.error
        target.take(output)

    def flush(self) -> None:
        """Lets the output be written."""
        self._wake.set()

    def abort(self) -> None:
        """Ends the requests early; the call then writes their ends."""
        self._is_aborted = True
        for output in self._outputs:
            self._core.abort(output.request)

    async def run(self, message: CallMessage) -> None:
        """Serves the call, and ends its requests with it.

        Raises:
            EngineError: it was refused before any message, or a request failed.
        """
        try:
            await self._admit(message)
            # The request was admitted: from now on the caller cannot safely resend it.
            await self.context.send_initial_metadata(())
            while not all(output.is_told for output in self._outputs):
                await self._wake.wait()
                self._wake.clear()
                await self._tell()
                if self._error is not None:
                    await self._fail(message, self._error)
                    return
        finally:
            self.abort()

    async def _admit(self, message: CallMessage) -> None:
        """Submits all requests to the core, or none."""
        outputs: list[CallOutput] = []
        try:
            self._core.check_ready()
            for request in self._requests_of(message):
                outputs.append(await self._prepare(message, request))
            self._submit(outputs)
        except BaseException as error:
            for output in outputs:
                output.request.release()
            if isinstance(error, EngineError):
                count_rejection(self._core.counters, error)
            raise

    def _submit(self, outputs: list[CallOutput]) -> None:
        if self._is_aborted:
            raise EngineUnavailableError("the caller gave the request up")
        self._outputs = outputs
        for output in outputs:
            self._core.submit(output.request)

    def _requests_of(self, message: CallMessage) -> list[Request]:
        timeout_s = self.context.time_remaining()
        traceparent = read_traceparent(self.context.invocation_metadata())
        requests = [
            self._reader.from_generate(sample, self, timeout_s=timeout_s, traceparent=traceparent)
            for sample in message.samples(max_model_len=self._reader.model.max_model_len)
        ]
        for index, request in enumerate(requests):
            request.handle = index
        return requests

    async def _prepare(self, message: CallMessage, request: Request) -> CallOutput:
        """Compiles a request's grammar and stop strings, which may take a while."""
        rule = message.stop_rule
        strings = None if rule is None else StopStrings(rule, await self._grammars.tokenizer())
        if request.structured_output is not None:
            request.constraint = await self._grammars.constrain(request.structured_output)
        return message.output(request, strings)

    async def _tell(self) -> None:
        """Writes pending output, and ends the requests stopped by a stop string."""
        for output in self._outputs:
            if output.is_over:
                self._core.abort(output.request)
            for response in output.responses():
                await write_in_time(self.context, response, self._timeout_s)

    async def _fail(self, message: CallMessage, error: EngineError) -> None:
        last = message.failure(error)
        if last is None:
            raise error
        await write_in_time(self.context, last, self._timeout_s)


class NamedCall(Protocol):
    """A call that others may end."""

    context: grpc.aio.ServicerContext

    def abort(self) -> None:
        """Ends the call's requests early."""


class OpenCalls:
    """The calls of one protocol that have a name, so that others can end them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: dict[str, NamedCall] = {}

    @contextmanager
    def live(self, name: str, call: NamedCall) -> Iterator[None]:
        """Makes a call known while it is served; an empty name cannot be found.

        Raises:
            DuplicateRequestError: a live call has the name.
        """
        if name in self._calls:
            error = DuplicateRequestError(f"request_id {name!r} belongs to a live request")
            count_rejection(self._core.counters, error)
            raise error
        if name:
            self._calls[name] = call
        try:
            yield
        finally:
            if name:
                del self._calls[name]

    def find(self, name: str) -> NamedCall | None:
        """Returns the live call of a name."""
        return self._calls.get(name)
