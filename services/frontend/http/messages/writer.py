"""Writes responses of the Messages API."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from services.frontend.http.messages.errors import message_error
from services.frontend.http.wire.status import HttpError
from services.frontend.http.wire.writer import ResponseWriter


class MessageWriter(ResponseWriter):
    """One response, whose events have names and whose errors have Anthropic's form."""

    last_event = b""
    names_events = True

    def __init__(self, send: Send, *, timeout_s: float, headers: Mapping[str, str]) -> None:
        """Adds the request's id under Anthropic's name."""
        own = {"request-id": headers["x-request-id"]}
        super().__init__(send, timeout_s=timeout_s, headers={**headers, **own})

    def error_body(self, told: HttpError) -> Mapping[str, Any]:
        """Returns an error in Anthropic's form, with the request's id."""
        return {**message_error(told), "request_id": self.headers["request-id"]}
