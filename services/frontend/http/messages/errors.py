"""Errors of the Messages API."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.wire.status import HttpError

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The vendor's code by which clients know to send a conversation without `thread`."""
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


class ProblemDetails(TypedDict):
    """The name of a mistake that clients know how to mend."""

    error_code: str


class MessageProblem(TypedDict):
    """The kind of an error, and its text."""

    type: str
    message: str
    details: NotRequired[ProblemDetails]


class MessageError(TypedDict):
    """An error, as a body or as the last event of a stream."""

    type: Literal["error"]
    error: MessageProblem
    request_id: NotRequired[str]
    """Absent where a request was refused before it had one."""


def message_error(told: HttpError) -> MessageError:
    """Returns an error as JSON; further statuses below 500 are the request's fault, too."""
    kind = _KINDS.get(told.status, _INTERNAL if told.status >= 500 else _KINDS[400])
    error: MessageProblem = {"type": kind, "message": told.message}
    if told.code == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": told.code}
    return {"type": "error", "error": error}
