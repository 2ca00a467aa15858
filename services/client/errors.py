"""Errors of a call, one class per gRPC status that callers distinguish.

OctavoError
├── UnauthenticatedError     UNAUTHENTICATED: there is no API key, or it is not known
├── InvalidRequestError      INVALID_ARGUMENT: the request can never be served as it is
├── UnsupportedError         UNIMPLEMENTED: the server does not do what was asked for
├── NotFoundError            NOT_FOUND: no such model
├── DuplicateRequestError    ALREADY_EXISTS: the request's id is taken by a live request
├── NotPermittedError        PERMISSION_DENIED: the operator does not allow it
├── OverloadedError          RESOURCE_EXHAUSTED: try again, after `retry_after_s` if it is given
├── UnavailableError         UNAVAILABLE: the server is away, starting or going down
├── DeadlineExceededError    DEADLINE_EXCEEDED: the time limit passed
├── CancelledError           CANCELLED: the call was cancelled
└── InternalError            any other status
"""

import re
from urllib.parse import unquote

import grpc

RETRY_PUSHBACK = "grpc-retry-pushback-ms"


class OctavoError(Exception):
    """Base of everything a call can fail with.

    Attributes:
        code: the gRPC status code's name, such as "UNAVAILABLE".
        retry_after_s: seconds after which trying again makes sense; None when the server is silent.
    """

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class UnauthenticatedError(OctavoError):
    """The server wants an API key that it knows."""


class InvalidRequestError(OctavoError):
    """The request can never be served as it is."""


class UnsupportedError(OctavoError):
    """The server does not do what was asked for."""


class NotFoundError(OctavoError):
    """The model is not served here."""


class DuplicateRequestError(OctavoError):
    """The request's id belongs to a request that is still live."""


class NotPermittedError(OctavoError):
    """The operator does not allow it."""


class OverloadedError(OctavoError):
    """Too many requests wait; trying again later makes sense."""


class UnavailableError(OctavoError):
    """The server cannot be reached, is starting or is going down."""


class DeadlineExceededError(OctavoError):
    """The time limit passed before the answer was complete."""


class CancelledError(OctavoError):
    """The call was cancelled before the answer was complete."""


class InternalError(OctavoError):
    """The server failed in a way that it does not explain."""


_CLASSES: dict[str, type[OctavoError]] = {
    "UNAUTHENTICATED": UnauthenticatedError,
    "INVALID_ARGUMENT": InvalidRequestError,
    "UNIMPLEMENTED": UnsupportedError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": DuplicateRequestError,
    "PERMISSION_DENIED": NotPermittedError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": CancelledError,
}
_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_OTHER_PROTOCOL = "Failed parsing HTTP/2"
"""gRPC says so of a server of HTTP/1, and of one with TLS."""
_CONNECT_FAILURE = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:)?(\S+): (?:.*: )?(.+)"
)


def error_of(code: int, message: str, retry_after_ms: int | None = None) -> OctavoError:
    """Returns the error of a gRPC status code, for raising."""
    name = _NAMES.get(code, "UNKNOWN")
    retry_after_s = None if retry_after_ms is None else retry_after_ms / 1000
    return _CLASSES.get(name, InternalError)(message, code=name, retry_after_s=retry_after_s)


def error_of_call(error: grpc.aio.AioRpcError) -> OctavoError:
    """Returns the error of a call that ended with a status, for raising."""
    metadata = dict(error.trailing_metadata() or ())
    pushback = metadata.get(RETRY_PUSHBACK)
    retry_after_ms = None if pushback is None else int(pushback)
    message = _CONNECT_FAILURE.sub(_connect_message, error.details() or "")
    return error_of(error.code().value[0], message or error.code().name, retry_after_ms)


def _connect_message(failure: re.Match[str]) -> str:
    # gRPC writes the brackets of an IPv6 address as %5B and %5D.
    address, reason = unquote(failure[1]), failure[2]
    if _OTHER_PROTOCOL in reason:
        return f"{address} does not answer in gRPC"
    return f"cannot connect to {address}: {reason}"
