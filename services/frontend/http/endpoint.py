"""The endpoints that run the model, and the responses in OpenAI's form."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import ABORTED, Usage
from services.frontend.errors import EngineUnavailableError
from services.frontend.http.answers.choices import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    usage_so_far,
)
from services.frontend.http.answers.echo import prompt_text
from services.frontend.http.bodies.calls import Call
from services.frontend.http.bodies.reader import BodyReader
from services.frontend.http.bodies.readers import Reader
from services.frontend.http.wire.body import Bodies, Body
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.http.wire.request_id import new_request_id
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Outlet, Pipeline
from services.frontend.pipeline.request import Conversation, Output, Prompt, prompts_of
from services.frontend.pipeline.samples import Samples
from services.frontend.reply.deltas import joined_calls
from services.telemetry.trace_context import TRACEPARENT, checked_traceparent
from services.transport.connections import address_of


class Response(Outlet, Protocol):
    """Writes the output of one request."""

    async def end(self) -> None:
        """Writes what follows the last output."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences between endpoints."""

    method: str
    """Its name in the log."""
    id_prefix: str
    reader: Reader
    """Its body parser."""
    respond: Callable[[Pipeline, Call, ResponseWriter], Response]
    """Begins a response; raises UnknownModelError or EngineUnavailableError."""
    writer_class: type[ResponseWriter] = ResponseWriter


class GenerationEndpoint:
    """An ASGI application for one endpoint, which notices that its client leaves."""

    def __init__(
        self,
        kind: Kind,
        pipeline: Pipeline,
        live: LiveRequests,
        bodies: Bodies,
        body_reader: BodyReader,
        *,
        slow_reader_timeout_s: float,
    ) -> None:
        self._kind = kind
        self._bodies = bodies
        self.pipeline = pipeline
        """Runs the requests."""
        self._live = live
        self._body_reader = body_reader
        self._slow_reader_timeout_s = slow_reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request_id = new_request_id(scope, self._kind.id_prefix)
        writer = self._kind.writer_class(
            send, timeout_s=self._slow_reader_timeout_s, headers={"x-request-id": request_id}
        )
        try:
            # A caller over its limits takes no shared slot, and its body is not read.
            address = address_of((scope["client"] or ("",))[0])
            begin = self.pipeline.begin
            with (
                begin(request_id, address, method=self._kind.method) as lease,
                self._live.place(),
            ):
                request = Request(scope, receive)
                with await self._bodies.read(request, lease.account) as body:
                    lease.num_bytes = body.num_bytes
                    work = self.serve(body, request_id, writer, request, lease)
                    await self._live.run(receive, work)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
            await writer.fail(error)

    async def read(self, body: Body, request_id: str, lease: Lease) -> Call:
        """Parses a body, whose bytes count until then."""
        with body:
            call = await self._body_reader.read(
                self._kind.reader,
                body.content,
                request_id,
                lease.account,
                max_prompt_tokens=self.pipeline.max_prompt_tokens,
            )
        if call.left_out:
            self.pipeline.requests.note_left_out(call.left_out)
        return call

    async def serve(
        self, body: Body, request_id: str, writer: ResponseWriter, request: Request, lease: Lease
    ) -> None:
        """Serves a request whose body was received."""
        traceparent = checked_traceparent(request.headers.get(TRACEPARENT, ""))
        with self.pipeline.requests.watch(
            request_id, method=self._kind.method, traceparent=traceparent
        ) as record:
            call = await self.read(body, request_id, lease)
            response = self._kind.respond(self.pipeline, call, writer)
            with call.naming_fields():
                await self.pipeline.serve(
                    call.prompt, call.options, response, record=record, lease=lease
                )
            await response.end()


class AnswerResponse:
    """Writes a request's output, as events or as one body at its end."""

    def __init__(
        self,
        answer_class: Callable[..., Answer],
        pipeline: Pipeline,
        call: Call,
        writer: ResponseWriter,
    ) -> None:
        """Raises UnknownModelError or EngineUnavailableError if the model is not served."""
        self._answer_class = answer_class
        self._pipeline = pipeline
        self._model = pipeline.model_named(call.options.model)
        self._call = call
        self._writer = writer
        self._answer: Answer
        self._usage = Usage()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._pieces: defaultdict[int, list[Output]] = defaultdict(list)

    async def begin(self, generation: Generation | Samples) -> None:
        """Starts the response, if it is a stream of events."""
        call, sampling = self._call, self._call.options.sampling
        # Only now: it allocates per sample, and n has just been checked.
        self._answer = answer = self._answer_class(
            call.options.request_id,
            self._model,
            has_logprobs=sampling is not None and sampling.HasField("logprobs"),
            tells_prompt=call.tells_prompt,
            streams_usage=call.includes_usage,
            num_samples=call.options.num_samples,
            show_special_tokens=call.options.show_special_tokens,
            stop_token_ids=frozenset(() if sampling is None else sampling.stop_token_ids),
        )
        self._num_prompt_tokens = sum(map(len, generation.prompts))
        if call.has_echo:
            for prompt, token_ids in zip(prompts_of(call.prompt), generation.prompts, strict=True):
                answer.echo(await self._prompt_text(prompt, token_ids), token_ids)
        if call.is_stream:
            await self._writer.start_events()
            for body in answer.opening():
                await self._write_chunk(body)

    async def write(self, output: Output) -> None:
        """Writes an event, or keeps the output for the end."""
        if output.finish_reason == ABORTED:  # no caller aborted it
            raise EngineUnavailableError("the engine ended the request")
        self._usage = output.usage or self._usage
        self._num_output_tokens += len(output.token_ids)
        if not self._call.is_stream:
            self._pieces[output.index].append(output)
        elif (
            output.text
            or output.reasoning
            or output.calls
            or output.logprobs
            or output.prompt_logprobs
            or output.finish_reason is not None
        ):
            await self._write_chunk(self._answer.chunk(output))

    async def end(self) -> None:
        """Ends the stream of events, or writes the body."""
        if self._call.is_stream:
            if self._call.includes_usage:
                await self._writer.write_event(self._answer.usage_chunk(self._usage))
            await self._writer.end_events()
            return
        outputs = [_joined(pieces) for _, pieces in sorted(self._pieces.items())]
        await self._writer.write(self._answer.whole(outputs, self._usage))

    async def _write_chunk(self, body: dict[str, Any]) -> None:
        if self._call.counts_usage:
            body["usage"] = usage_so_far(
                prompt_tokens=self._num_prompt_tokens, output_tokens=self._num_output_tokens
            )
        await self._writer.write_event(body)

    async def _prompt_text(self, prompt: Prompt, token_ids: Sequence[int]) -> str:
        """Returns a prompt as given, the text of its token ids, or a conversation's open text.

        A text that may have been cut is that of its token ids, too.
        """
        if isinstance(prompt, str) and self._call.options.truncate_prompt_tokens is None:
            return prompt
        if isinstance(prompt, Conversation):
            return prompt.open_text
        decoded = await self._pipeline.detokenize(
            "", token_ids, self._pipeline.gate.acting_account, show_special_tokens=False
        )
        return prompt_text(self._model.tokenizer, token_ids, decoded)


COMPLETION = Kind(
    "HttpCompletion", "cmpl-", "completion", partial(AnswerResponse, CompletionAnswer)
)
CHAT = Kind("HttpChat", "chatcmpl-", "chat", partial(AnswerResponse, ChatAnswer))


def _joined(pieces: list[Output]) -> Output:
    """Merges the pieces of one output."""
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=joined_calls(call for piece in pieces for call in piece.calls),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[position for piece in pieces for position in piece.logprobs],
        prompt_logprobs=[position for piece in pieces for position in piece.prompt_logprobs],
    )
