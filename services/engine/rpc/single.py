"""One request with a call of its own."""

import asyncio

import grpc

from protos.engine.v1.engine_pb2 import GenerateRequest, GenerateResponse
from services.engine.config.serving import ServingConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.open_streams import write_in_time
from services.engine.edge.output import (
    FINISH_REASONS,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    usage_of,
)
from services.engine.edge.request_reader import RequestReader
from services.engine.edge.status import count_rejection
from services.engine.errors import EngineError
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.request import OutputSink, RequestOutput
from services.telemetry.trace_context import read_traceparent


class SingleCall(OutputSink):
    """Serves one Generate call, and is the sink of its request.

    Unread output is merged into one message, whose size the context length bounds.
    """

    def __init__(
        self,
        core: EngineCore,
        reader: RequestReader,
        config: ServingConfig,
        context: grpc.aio.ServicerContext,
        grammars: GrammarCompiler,
    ) -> None:
        self._grammars = grammars
        self._core = core
        self._reader = reader
        self._timeout_s = config.slow_reader_timeout_s
        self._context = context
        self._response = GenerateResponse()
        self._has_ended = False
        self._error: EngineError | None = None
        self._wake = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Takes the request's output of one step."""
        response = self._response
        response.token_ids.extend(output.token_ids)
        if output.logprobs:
            response.logprobs.extend(map(logprobs_to_proto, output.token_ids, output.logprobs))
        if output.prompt_logprobs:
            response.prompt_logprobs.extend(prompt_logprobs_to_proto(output))
        if output.stop_token_id is not None:
            response.stop_token_id = output.stop_token_id
        if output.finish_reason is not None:
            response.finish_reason = FINISH_REASONS[output.finish_reason]
            response.usage.CopyFrom(usage_of(output.request))
        self._error = output.error
        self._has_ended = output.is_last

    def flush(self) -> None:
        """Lets `run` send the output."""
        self._wake.set()

    async def run(self, message: GenerateRequest) -> None:
        """Serves the call; its end ends the request.

        Raises:
            EngineError: the request was refused, before any message, or failed.
        """
        try:
            self._core.check_ready()
            request = self._reader.from_generate(
                message,
                self,
                timeout_s=self._context.time_remaining(),
                traceparent=read_traceparent(self._context.invocation_metadata()),
            )
            if request.structured_output is not None:
                request.constraint = await self._grammars.constrain(request.structured_output)
            self._core.submit(request)
        except EngineError as error:
            count_rejection(self._core.counters, error)
            raise
        try:
            # From here on, the caller must not send the request again.
            await self._context.send_initial_metadata(())
            await self._send()
        finally:
            self._core.abort(request)

    async def _send(self) -> None:
        has_ended = False
        while not has_ended:
            await self._wake.wait()
            self._wake.clear()
            has_ended = self._has_ended
            response, self._response = self._response, GenerateResponse()
            if response.token_ids or response.finish_reason or response.prompt_logprobs:
                await write_in_time(self._context, response, self._timeout_s)
        if self._error is not None:
            raise self._error
