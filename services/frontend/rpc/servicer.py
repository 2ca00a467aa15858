"""The methods of FrontendService."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from protos.frontend.v1 import frontend_pb2
from services.frontend.access.held_bytes import HeldBytes
from services.frontend.pipeline.parts import in_parts
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Output, Prompt
from services.frontend.rpc.convert import (
    conversation_of,
    engines_to_proto,
    input_of,
    options_of,
    output_to_proto,
    parse_special_tokens_of,
    prompt_of,
    refuse_unknown_fields,
)
from services.frontend.rpc.explain import explain
from services.frontend.rpc.session import ClientSession, SessionLimits
from services.frontend.rpc.vectors import VectorServicer
from services.frontend.rpc.writer import Writer
from services.telemetry.trace_context import read_traceparent
from services.transport.callers import address_of
from services.transport.counts import Counts
from services.transport.message_reader import RefusedMessage

MAX_COLLECTED_PROMPTS = 64
"""Longest prompts whose parts are in memory at a time."""
MAX_COLLECTED_PROMPTS_OF_ACCOUNT = 16
"""Limit per account: an API key, or a client address without keys."""


class FrontendServicer(VectorServicer):
    """Serves FrontendService. Methods raise errors; the interceptor maps them."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        counts: Counts,
        slow_reader_timeout_s: float,
        session_limits: SessionLimits,
    ) -> None:
        super().__init__(pipeline)
        self._session_limits = session_limits
        max_prompt_bytes = session_limits.max_prompt_bytes
        self._parts = HeldBytes(
            counts,
            "prompt_part_bytes",
            "prompts that come in parts",
            limit=MAX_COLLECTED_PROMPTS * max_prompt_bytes,
            limit_per_account=MAX_COLLECTED_PROMPTS_OF_ACCOUNT * max_prompt_bytes,
        )
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Lets sessions refuse new requests, and end after the running ones."""
        self._draining.set()

    async def Generate(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Continues one prompt."""
        read = partial(prompt_of, request, max_tokens=self._pipeline.models.max_prompt_tokens)
        await self._respond(request, read, context, frontend_pb2.GenerateResponse)

    async def Chat(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.ChatRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Answers a conversation."""
        read = partial(conversation_of, request)
        await self._respond(request, read, context, frontend_pb2.ChatResponse)

    async def Session(  # noqa: N802  the protocol's name
        self,
        requests: AsyncIterator[frontend_pb2.SessionRequest | RefusedMessage],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serves many requests over one stream."""
        session = ClientSession(
            self._pipeline,
            Writer(context, timeout_s=self._slow_reader_timeout_s),
            draining=self._draining,
            time_remaining=context.time_remaining,
            traceparent=read_traceparent(context.invocation_metadata()),
            address=address_of(context.peer()),
            parts=self._parts,
            limits=self._session_limits,
        )
        await context.send_initial_metadata(())
        await session.run(requests)

    async def Tokenize(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.TokenizeResponse:
        """Encodes text or a conversation."""
        with self.begin(request, "", context, method="Tokenize", is_free=True) as lease:
            refuse_unknown_fields(request)
            token_ids = await self._pipeline.tokenize(
                request.model,
                input_of(request),
                lease,
                parse_special_tokens=parse_special_tokens_of(request),
            )
        tokenizer = self._pipeline.models.named(request.model).tokenizer
        response = frontend_pb2.TokenizeResponse()
        async for part in in_parts(token_ids):
            response.token_ids.extend(part)
            response.tokens.extend(tokenizer.token_texts(part))
        return response

    async def Detokenize(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.DetokenizeResponse:
        """Decodes token ids."""
        with self.begin(request, "", context, method="Detokenize", is_free=True) as lease:
            refuse_unknown_fields(request)
            text = await self._pipeline.detokenize(
                request.model,
                request.token_ids,
                lease.account,
                show_special_tokens=request.show_special_tokens,
            )
        return frontend_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.ListModelsResponse:
        """Lists the served models; nothing before the first connection to an engine."""
        del context
        refuse_unknown_fields(request)
        response = frontend_pb2.ListModelsResponse()
        for model in self._pipeline.models.all:
            for name in (model.info.model, *self._pipeline.models.adapter_names(model)):
                response.models.add(
                    name=name,
                    max_model_len=model.info.max_model_len,
                    default_sampling=model.info.default_sampling,
                    ready=self._pipeline.engine.is_ready,
                    architecture=model.info.architecture,
                    chat_template_error=model.template_error,
                )
        return response

    async def ListEngines(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.ListEnginesResponse:
        """Shows the engines to callers with that permission."""
        del context
        self._pipeline.gate.check_may_list_engines()
        refuse_unknown_fields(request)
        return engines_to_proto(self._pipeline.engine)

    async def ExplainRequest(  # noqa: N802  the protocol's name
        self, request: frontend_pb2.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.ExplainRequestResponse:
        """Says where the time of one of the caller's requests went."""
        # The slot bounds how many of its calls ask the engines at a time.
        with self.begin(request, "", context, method="ExplainRequest", is_free=True) as lease:
            refuse_unknown_fields(request)
            return await explain(self._pipeline, request.request_id, lease.caller)

    async def _respond(
        self,
        request: frontend_pb2.GenerateRequest | frontend_pb2.ChatRequest,
        read: Callable[[], Prompt],
        context: grpc.aio.ServicerContext,
        response_class: Any,
    ) -> None:
        """Runs one request within the call's deadline and writes its output."""
        method = response_class.DESCRIPTOR.name.removesuffix("Response")
        with self.begin(request, request.options.request_id, context, method=method) as lease:
            refuse_unknown_fields(request)
            prompt, options = read(), options_of(request.options)
            traceparent = options.traceparent or read_traceparent(context.invocation_metadata())
            writer = Writer(context, timeout_s=self._slow_reader_timeout_s)
            with self._pipeline.requests.watch(
                options.request_id, method=method, traceparent=traceparent
            ) as record:
                await self._pipeline.serve(
                    prompt,
                    options,
                    _Call(context, writer, response_class),
                    record=record,
                    lease=lease,
                    timeout_s=context.time_remaining(),
                )


@dataclass(frozen=True, slots=True)
class _Call:
    """Writes the output of a request with its own call."""

    context: grpc.aio.ServicerContext
    writer: Writer
    response_class: Any

    async def begin(self, generation: object) -> None:
        """Sends the metadata; until then, a refusal is a status alone and clients may retry."""
        del generation
        await self.context.send_initial_metadata(())

    async def write(self, output: Output) -> None:
        """Writes one message."""
        await self.writer.write(self.response_class(output=output_to_proto(output)))
