"""The two endpoints of the Messages API."""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.access.caller import Lease
from services.frontend.http.endpoint import Endpoint, GenerationEndpoint, PlainEndpoint, Response
from services.frontend.http.messages.answer import MessageAnswer
from services.frontend.http.messages.answer_schema import CountAnswer
from services.frontend.http.messages.calls import MessageCall
from services.frontend.http.messages.edits import edited
from services.frontend.http.messages.errors import MessageError, message_error
from services.frontend.http.wire.body import Body
from services.frontend.http.wire.status import ErrorForms, HttpError, RefusedCallError
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Conversation, Output
from services.frontend.pipeline.samples import Samples

FIRST_VERSION = "2023-06-01"
"""The first version of the API with the events that are served; later ones go on with them."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


class RequireVersion:
    """An ASGI application that refuses requests for a version of the API without these events."""

    def __init__(self, app: ASGIApp, errors: ErrorForms) -> None:
        self._app = app
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; the version may be absent."""
        version = Headers(scope=scope).get("anthropic-version", FIRST_VERSION)
        if not _DATE.fullmatch(version) or version < FIRST_VERSION:
            refusal = RefusedCallError(
                400, f"anthropic-version is {version[:64]!r}; it must be {FIRST_VERSION} or later"
            )
            await self._errors.response(scope["path"], refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class MessageWriter(ResponseWriter):
    """One response, whose events have names and whose errors have Anthropic's form."""

    last_event = b""
    names_events = True

    def __init__(self, send: Send, *, timeout_s: float, headers: Mapping[str, str]) -> None:
        """Adds the request's id under Anthropic's name."""
        own = {"request-id": headers["x-request-id"]}
        super().__init__(send, timeout_s=timeout_s, headers={**headers, **own})

    def error_body(self, told: HttpError) -> MessageError:
        """Returns an error in Anthropic's form, with the request's id."""
        return {**message_error(told), "request_id": self.headers["request-id"]}


class MessageResponse(Response[MessageCall]):
    """Writes a reply, as events or as one body at its end."""

    def __init__(self, pipeline: Pipeline, call: MessageCall, writer: ResponseWriter) -> None:
        """Raises UnknownModelError or EngineUnavailableError if the model is not served."""
        super().__init__(pipeline, call, writer)
        self._answer: MessageAnswer
        self._outputs: list[Output] = []

    async def begin(self, generation: Generation | Samples) -> None:
        """Starts the response, if it is a stream of events."""
        self._answer = MessageAnswer(
            self._call.options.request_id,
            self._model.name,
            num_prompt_tokens=sum(map(len, generation.prompts)),
            shows_thinking=self._call.shows_thinking,
            applied_edits=None if self._call.edits is None else self._call.applied_edits,
        )
        if self._call.is_stream:
            await self._writer.start_events()
            await self._writer.write_events(self._answer.opening())

    async def add(self, output: Output) -> None:
        """Writes events, or keeps the output for the end."""
        if self._call.is_stream:
            self._outputs = [output]
            await self._writer.write_events(self._answer.events(output))
        else:
            self._outputs.append(output)

    async def end(self) -> None:
        """Ends the stream of events, or writes the body."""
        if self._call.is_stream:
            await self._writer.write_events(self._answer.closing(self._outputs[-1], self._usage))
            await self._writer.end_events()
        else:
            await self._writer.write(self._answer.whole(self._outputs, self._usage))


class EditingEndpoint(Endpoint[MessageCall]):
    """Reads a conversation, from which the request may want parts cleared."""

    async def read(self, body: Body, request_id: str, lease: Lease) -> MessageCall:
        """Parses a body, and edits its conversation.

        Raises:
            FrontendError: the body is invalid, or the conversation cannot be used.
        """
        call = await super().read(body, request_id, lease)
        assert isinstance(call.prompt, Conversation), "bodies of these kinds have one"
        if not call.edits:
            return call
        with call.naming_fields():
            prompt, applied = await edited(
                call.prompt, call.edits, partial(self.count, call, lease)
            )
        return dataclasses.replace(call, prompt=prompt, applied_edits=applied)

    async def count(self, call: MessageCall, lease: Lease, prompt: Conversation) -> int:
        """Returns the number of tokens of a conversation."""
        return len(await self.pipeline.tokenize(call.options.model, prompt, lease))


class MessageEndpoint(EditingEndpoint, GenerationEndpoint[MessageCall]):
    """Answers a conversation."""

    def respond(self, call: MessageCall, writer: ResponseWriter) -> Response[MessageCall]:
        """Begins a reply; raises UnknownModelError or EngineUnavailableError."""
        return MessageResponse(self.pipeline, call, writer)


class CountEndpoint(EditingEndpoint, PlainEndpoint[MessageCall]):
    """Answers how many tokens a conversation has."""

    async def answer(self, call: MessageCall, writer: ResponseWriter, lease: Lease) -> None:
        """Writes the answer to a parsed request."""
        assert isinstance(call.prompt, Conversation), "bodies of this kind have one"
        num_tokens = await self.count(call, lease, call.prompt)
        answer: CountAnswer = {"input_tokens": num_tokens}
        if call.edits is not None:
            num_cleared = sum(edit["cleared_input_tokens"] for edit in call.applied_edits)
            answer["context_management"] = {"original_input_tokens": num_tokens + num_cleared}
        await writer.write(answer)
