"""Writes responses and errors of the Messages API."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from services.frontend.http.messages.calls import THREAD_UNSUPPORTED
from services.frontend.http.wire.status import HttpError
from services.frontend.http.wire.writer import ResponseWriter

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_INTERNAL = "api_error"


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


def message_error(told: HttpError) -> dict[str, object]:
    """Returns an error as JSON; further statuses below 500 are the request's fault, too."""
    kind = _KINDS.get(told.status, _INTERNAL if told.status >= 500 else _KINDS[400])
    error: dict[str, object] = {"type": kind, "message": told.message}
    if told.code == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": told.code}
    return {"type": "error", "error": error}
