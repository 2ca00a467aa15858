"""Parses bodies of the Messages API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call, form_field
from services.frontend.http.fields.parse import parse_body
from services.frontend.http.messages.answer_schema import AppliedEdit
from services.frontend.http.messages.convert import (
    conversation_of,
    edits_of,
    left_out,
    options_of,
    shows_thinking,
)
from services.frontend.http.messages.edit_schema import ClearThinking, ClearToolUses
from services.frontend.http.messages.errors import THREAD_UNSUPPORTED
from services.frontend.http.messages.schema import TAGS, CountTokensRequest, MessagesRequest
from services.frontend.pipeline.request import Options

_UNKNOWN = ": Extra inputs are not permitted"
"""The vendor's words for an unknown field, by which clients know to leave it out."""
_Request = TypeVar("_Request", bound=CountTokensRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCall(Call):
    """A parsed body of the Messages API."""

    edits: Sequence[ClearThinking | ClearToolUses] | None
    """Edits of the conversation that may change it; None if the body has no context_management."""
    applied_edits: Sequence[AppliedEdit] = ()
    """Edits that have changed it, as the answer reports them."""
    shows_thinking: bool = True
    """Whether the answer has the text of its thinking."""


def read_message(body: bytes, request_id: str, *, is_strict: bool = False) -> MessageCall:
    """Parses a request for a reply; see `ReadCall`."""
    request = _parse(MessagesRequest, body, is_strict=is_strict)
    options = options_of(request, request_id)
    return MessageCall(
        conversation_of(request),
        options,
        bool(request.stream),
        form_field=form_field(options, request, "output_format", "output_config"),
        left_out=left_out(request, is_strict=is_strict),
        edits=edits_of(request),
        shows_thinking=shows_thinking(request),
    )


def read_count(body: bytes, request_id: str, *, is_strict: bool = False) -> MessageCall:
    """Parses a request for the size of a prompt; see `ReadCall`."""
    request = _parse(CountTokensRequest, body, is_strict=is_strict)
    return MessageCall(
        conversation_of(request),
        Options(model=request.model, request_id=request_id),
        left_out=left_out(request, is_strict=is_strict),
        edits=edits_of(request),
    )


def _parse(request_class: type[_Request], body: bytes, *, is_strict: bool) -> _Request:
    request = parse_body(request_class, body, is_strict=is_strict, tags=TAGS, unknown=_UNKNOWN)
    if request.thread is not None:
        raise InvalidRequestError(
            "thread is not supported; send the whole conversation without it",
            field="thread",
            code=THREAD_UNSUPPORTED,
        )
    return request
