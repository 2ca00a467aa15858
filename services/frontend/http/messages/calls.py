"""Parses bodies of the Messages API."""

from services.frontend.http.calls import Call, form_field
from services.frontend.http.messages.convert import conversation_of, options_of
from services.frontend.http.messages.schema import TAGS, CountTokensRequest, MessagesRequest
from services.frontend.http.schema import parse_body
from services.frontend.pipeline.request import Options


def read_message(body: bytes, request_id: str, *, is_strict: bool = False) -> Call:
    """Parses a request for a reply.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse_body(MessagesRequest, body, is_strict=is_strict, tags=TAGS)
    options = options_of(request, request_id)
    return Call(
        conversation_of(request),
        options,
        bool(request.stream),
        includes_usage=True,
        tells_prompt=False,
        form_field=form_field(options, request, "output_config"),
    )


def read_count(body: bytes, request_id: str, *, is_strict: bool = False) -> Call:
    """Parses a request for the size of a prompt.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse_body(CountTokensRequest, body, is_strict=is_strict, tags=TAGS)
    return Call(
        conversation_of(request),
        Options(model=request.model, request_id=request_id),
        is_stream=False,
        includes_usage=True,
        tells_prompt=False,
    )
