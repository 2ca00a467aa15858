"""Creates responses."""

import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import structlog

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import STOP, FinishReason
from services.frontend.http.answers.logprobs import ChatLogprobs
from services.frontend.http.endpoint import (
    Endpoint,
    GenerationEndpoint,
    Kind,
    PlainEndpoint,
    Response,
    Serving,
)
from services.frontend.http.responses.answer_schema import InputTokenCount, ResponseProblem
from services.frontend.http.responses.answer_schema import Response as ResponseBody
from services.frontend.http.responses.calls import ResponsesCall
from services.frontend.http.responses.event_schema import ResponseStage, Stage
from services.frontend.http.responses.items import (
    SYSTEM_ROLES,
    messages_of_output,
    with_instructions,
)
from services.frontend.http.responses.output import OutputItems
from services.frontend.http.responses.resource import ResponseObject, usage_body
from services.frontend.http.responses.store import ResponseStore
from services.frontend.http.wire.body import Body
from services.frontend.http.wire.status import HttpError
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prompt_size import output_room
from services.frontend.pipeline.request import Conversation, Output
from services.frontend.pipeline.samples import Samples
from services.frontend.text.chat_template import Message


class ConversationEndpoint(Endpoint[ResponsesCall]):
    """Puts the conversation of a response together."""

    def __init__(self, kind: Kind[ResponsesCall], serving: Serving, store: ResponseStore) -> None:
        super().__init__(kind, serving)
        self._store = store

    async def read(self, body: Body, request_id: str, lease: Lease) -> ResponsesCall:
        """Parses a body, and puts its conversation together.

        Raises:
            UnknownResponseError: the previous response is not in the store.
            FrontendError: the body is invalid, or the conversation cannot be used.
        """
        call = await super().read(body, request_id, lease)
        previous, new = None, call.new_messages
        if call.previous_response_id is not None:
            owner = self.pipeline.gate.acting_account
            previous = self._store.turn(owner, call.previous_response_id)
        messages: Sequence[Message] = [*self._store.messages_to(previous), *new]
        if call.is_truncated:
            with call.naming_fields():
                kept = await truncated(messages, partial(self._fits, call, lease))
            if len(kept) < len(messages):
                # Dropped turns are not kept for later ones either: the conversation stays bounded.
                previous, new, messages = None, kept, kept
        prompt = _prompt_of(call, messages)
        return dataclasses.replace(call, prompt=prompt, new_messages=new, previous=previous)

    async def _fits(self, call: ResponsesCall, lease: Lease, messages: Sequence[Message]) -> bool:
        """Whether messages leave room for the output, which is at most half of the context."""
        options = call.options
        max_model_len = self.pipeline.models.named(options.model).info.max_model_len
        token_ids = await self.pipeline.tokenize(
            options.model,
            _prompt_of(call, messages),
            lease,
            parse_special_tokens=options.parse_special_tokens,
        )
        room = output_room(call.max_output_tokens or 1, max_model_len)
        return len(token_ids) + room <= max_model_len


class ResponsesEndpoint(ConversationEndpoint, GenerationEndpoint[ResponsesCall]):
    """Creates responses."""

    def respond(self, call: ResponsesCall, writer: ResponseWriter) -> Response[ResponsesCall]:
        """Begins a response; raises UnknownModelError or EngineUnavailableError."""
        return ResponsesResponse(self._store, self.pipeline, call, writer)


class InputTokensEndpoint(ConversationEndpoint, PlainEndpoint[ResponsesCall]):
    """Answers how many tokens the input of a response has."""

    async def answer(self, call: ResponsesCall, writer: ResponseWriter, lease: Lease) -> None:
        """Writes the answer to a parsed request."""
        assert isinstance(call.prompt, Conversation), "bodies of this kind have one"
        token_ids = await self.pipeline.tokenize(
            call.options.model,
            call.prompt,
            lease,
            parse_special_tokens=call.options.parse_special_tokens,
        )
        answer: InputTokenCount = {
            "object": "response.input_tokens",
            "input_tokens": len(token_ids),
        }
        await writer.write(answer)


class ResponsesWriter(ResponseWriter):
    """One response, whose events have names and whose failure is an event."""

    names_events = True
    _failed: Callable[[ResponseProblem], ResponseStage] | None = None

    async def start_response(self, failed: Callable[[ResponseProblem], ResponseStage]) -> None:
        """Starts a stream of events; `failed` returns the event of an error."""
        await self.start_events()
        self._failed = failed

    def error_body(self, told: HttpError) -> Mapping[str, Any]:
        """Returns an error as a body, or in a stream as the event of a failed response."""
        if self._failed is None:
            if told.param == "messages":  # the conversation's name in the pipeline
                told = dataclasses.replace(told, param="input")
            return super().error_body(told)
        if told.status == 429:
            return self._failed({"code": "rate_limit_exceeded", "message": told.message})
        return self._failed({"code": "server_error", "message": told.message})


class ResponsesResponse(Response[ResponsesCall]):
    """Writes a response, as events or as one body at its end, and stores it."""

    def __init__(
        self, store: ResponseStore, pipeline: Pipeline, call: ResponsesCall, writer: ResponseWriter
    ) -> None:
        """Raises UnknownModelError or EngineUnavailableError if the model is not served."""
        super().__init__(pipeline, call, writer)
        self._store = store
        self._owner = pipeline.gate.acting_account
        sampling = call.options.sampling
        has_logprobs = sampling is not None and sampling.HasField("logprobs")
        self._numbers = count()
        self._items = OutputItems(
            ChatLogprobs(self._model.tokenizer) if has_logprobs else None,
            numbers=self._numbers,
            names=call.names,
            demanded=call.demanded,
        )
        self._is_stored = call.is_stored and store.is_enabled
        self._response = ResponseObject(self._model, call, is_stored=self._is_stored)
        structlog.contextvars.bind_contextvars(response_id=self._response.id)
        self._finish_reason: FinishReason | None = None

    async def begin(self, generation: Generation | Samples) -> None:
        """Starts the response, if it is a stream of events."""
        del generation
        if self._call.is_stream:
            assert isinstance(self._writer, ResponsesWriter), "of the same kind"
            await self._writer.start_response(self._failed)
            body = self._response.body("in_progress")
            stages: tuple[Stage, ...] = ("response.created", "response.in_progress")
            await self._writer.write_events([self._event(stage, body) for stage in stages])

    async def add(self, output: Output) -> None:
        """Adds to the items, and writes their events."""
        self._finish_reason = output.finish_reason
        events = self._items.push(output)
        if self._call.is_stream:
            await self._writer.write_events(events)

    async def end(self) -> None:
        """Stores the response; ends the stream of events, or writes the body."""
        items = self._items.snapshot()
        usage = usage_body(self._usage)
        stage: Stage = "response.completed"
        body = self._response.body("completed", output=items, usage=usage)
        if self._finish_reason != STOP:
            stage = "response.incomplete"
            body = self._response.body("incomplete", output=items, usage=usage)
        if self._is_stored:
            # Before the client sees the end: its next request may follow at once.
            self._keep(body)
        if self._call.is_stream:
            await self._writer.write_event(self._event(stage, body))
            await self._writer.end_events()
        else:
            await self._writer.write(body)

    def _keep(self, body: ResponseBody) -> None:
        output = json.dumps(body["output"]).encode()
        reply = messages_of_output(output)
        self._store.put(
            self._owner,
            self._response.id,
            json.dumps(body).encode(),
            [*self._call.new_messages, *reply],
            self._call.previous,
            input_items=self._call.input_items,
            output_items=output,
        )

    def _event(self, stage: Stage, body: ResponseBody) -> ResponseStage:
        return {"type": stage, "sequence_number": next(self._numbers), "response": body}

    def _failed(self, error: ResponseProblem) -> ResponseStage:
        body = self._response.body("failed", output=self._items.snapshot(), error=error)
        return self._event("response.failed", body)


def _prompt_of(call: ResponsesCall, messages: Sequence[Message]) -> Conversation:
    """Returns the conversation of a call with all its messages and instructions."""
    assert isinstance(call.prompt, Conversation), "bodies of this kind have one"
    complete = with_instructions(call.instructions, messages)
    return dataclasses.replace(call.prompt, messages=complete)


async def truncated(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], Awaitable[bool]]
) -> Sequence[Message]:
    """Returns the messages without as many of the oldest turns as make them fit.

    A turn begins with a user's message. System messages at the beginning stay, and so does the last
    turn, even if it does not fit.
    """
    shorter = _shorter(messages)
    low, high = 0, len(shorter) - 1
    while low < high:
        middle = (low + high) // 2 if low else 0  # most conversations fit as they are
        if await fits(shorter[middle]):
            high = middle
        else:
            low = middle + 1
    return shorter[low]


def _shorter(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Returns the conversation, then the same without its first turn, its first two, and so on."""
    num_system = next(
        (i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages)
    )
    starts = [i for i in range(num_system + 1, len(messages)) if messages[i]["role"] == "user"]
    return [messages, *([*messages[:num_system], *messages[start:]] for start in starts)]
