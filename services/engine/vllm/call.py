"""One Generate call, with one request per output."""

import asyncio

import grpc
from smg_grpc_proto.generated.vllm_engine_pb2 import GenerateRequest

from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.open_streams import write_in_time
from services.engine.edge.request_reader import RequestReader
from services.engine.edge.status import count_rejection
from services.engine.errors import EngineError, EngineUnavailableError
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.request import Request, RequestOutput
from services.engine.vllm.output import CallOutput
from services.engine.vllm.requests import (
    check_served,
    check_sizes,
    stop_rule,
    to_samples,
)
from services.engine.vllm.stop_strings import StopStrings
from services.telemetry.trace_context import read_traceparent


class VllmCall:
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
        self._context = context
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

    @property
    def connection(self) -> str:
        """The connection of the call."""
        peer: str = self._context.peer()
        return peer

    def abort(self) -> None:
        """Ends the requests early; the call then writes their ends."""
        self._is_aborted = True
        for output in self._outputs:
            self._core.abort(output.request)

    async def run(self, message: GenerateRequest) -> None:
        """Serves the call, and ends its requests with it.

        Raises:
            EngineError: it was refused before any message, or a request failed.
        """
        try:
            await self._admit(message)
            # The request was admitted: from now on the caller cannot safely resend it.
            await self._context.send_initial_metadata(())
            while not all(output.is_told for output in self._outputs):
                await self._wake.wait()
                self._wake.clear()
                await self._tell()
        finally:
            self.abort()

    async def _admit(self, message: GenerateRequest) -> None:
        """Submits all requests to the core, or none."""
        outputs: list[CallOutput] = []
        try:
            self._core.check_ready()
            check_served(message)
            check_sizes(message, max_model_len=self._reader.model.max_model_len)
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

    def _requests_of(self, message: GenerateRequest) -> list[Request]:
        timeout_s = self._context.time_remaining()
        traceparent = read_traceparent(self._context.invocation_metadata())
        requests = [
            self._reader.from_generate(sample, self, timeout_s=timeout_s, traceparent=traceparent)
            for sample in to_samples(message)
        ]
        for index, request in enumerate(requests):
            request.handle = index
        return requests

    async def _prepare(self, message: GenerateRequest, request: Request) -> CallOutput:
        """Compiles a request's grammar and stop strings, which may take a while."""
        given = message.sampling_params
        rule = stop_rule(given)
        strings = None if rule is None else StopStrings(rule, await self._grammars.tokenizer())
        if request.structured_output is not None:
            request.constraint = await self._grammars.constrain(request.structured_output)
        return CallOutput(
            request,
            is_streamed=message.stream,
            own_stop_token_ids=frozenset(given.stop_token_ids),
            stop_strings=strings,
        )

    async def _tell(self) -> None:
        """Writes pending output, and ends the requests stopped by a stop string."""
        for output in self._outputs:
            if output.is_over:
                self._core.abort(output.request)
            for response in output.responses():
                await write_in_time(self._context, response, self._timeout_s)
        if self._error is not None:
            raise self._error
