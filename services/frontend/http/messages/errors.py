"""Errors in the form of the Messages API."""

from services.frontend.http.wire.status import HttpError

PATH = "/v1/messages"
"""Requests to it, and below it, get errors in this form."""
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
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The vendor's code by which clients know to send a conversation without `thread`."""
_INTERNAL = "api_error"


def message_error(told: HttpError) -> dict[str, object]:
    """Returns an error as JSON; further statuses below 500 are the request's fault, too."""
    kind = _KINDS.get(told.status, _INTERNAL if told.status >= 500 else _KINDS[400])
    error: dict[str, object] = {"type": kind, "message": told.message}
    if told.code == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": told.code}
    return {"type": "error", "error": error}
