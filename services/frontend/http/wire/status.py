"""The HTTP status and body of each error."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from services.frontend.errors import (
    DeadlineExpiredError,
    DuplicateRequestError,
    EngineUnavailableError,
    FrontendError,
    InvalidRequestError,
    NotPermittedError,
    OverloadedError,
    SlowReaderError,
    UnauthenticatedError,
    UnknownModelError,
    UnknownRequestError,
    UnknownResponseError,
)
from services.transport.interceptors import internal_status
from services.transport.status import shortened

DEFAULT_RETRY_AFTER_S = 1


class ErrorFields(TypedDict):
    """The problem with a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """An error in OpenAI's form."""

    error: ErrorFields


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as a client sees it."""

    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    """The wrong field of the request, if known."""
    retry_after_s: int | None = None

    @property
    def body(self) -> Error:
        """The error as JSON in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the status."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


STATUSES: dict[type[FrontendError], tuple[int, str, str | None]] = {
    UnauthenticatedError: (401, "invalid_request_error", "invalid_api_key"),
    NotPermittedError: (403, "invalid_request_error", "not_permitted"),
    InvalidRequestError: (400, "invalid_request_error", None),
    UnknownModelError: (404, "invalid_request_error", "model_not_found"),
    UnknownRequestError: (404, "invalid_request_error", "request_not_found"),
    UnknownResponseError: (404, "invalid_request_error", "response_not_found"),
    DuplicateRequestError: (409, "invalid_request_error", "duplicate_request"),
    OverloadedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    SlowReaderError: (429, "rate_limit_error", "slow_reader"),
    EngineUnavailableError: (503, "server_error", "service_unavailable"),
    DeadlineExpiredError: (504, "server_error", "deadline_exceeded"),
}
"""Status, type and code of each error."""


class RefusedCallError(Exception):
    """An error at the level of HTTP, before the request is parsed."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def http_error_of(error: BaseException) -> HttpError:
    """Returns an error as a client sees it.

    An internal error is logged and becomes 500 with an id.
    """
    if isinstance(error, RefusedCallError):
        return HttpError(error.status, "invalid_request_error", shortened(str(error)), error.code)
    if not isinstance(error, FrontendError):
        return HttpError(500, "server_error", internal_status(error).message, "internal_error")
    status, kind, code = STATUSES[type(error)]
    param = "model" if isinstance(error, UnknownModelError) else None
    if isinstance(error, InvalidRequestError | UnknownResponseError):
        param = error.field
    if isinstance(error, InvalidRequestError):
        code = error.code
    if isinstance(error, UnknownResponseError) and param is not None:
        code = f"previous_{code}"
    return HttpError(
        status, kind, shortened(str(error)), code, param, _retry_after_s(error, status)
    )


class ErrorForms:
    """Answers with errors in the form of the API that a path belongs to."""

    def __init__(self, forms: Mapping[str, Callable[[HttpError], Mapping[str, Any]]]) -> None:
        """Takes the forms of paths, and of all below them; the others have OpenAI's form."""
        self._forms = forms

    def response(self, path: str, error: BaseException) -> JSONResponse:
        """Returns the response to a request that did not reach its endpoint."""
        told = http_error_of(error)
        body: Mapping[str, Any] = told.body
        for start, form in self._forms.items():
            if path == start or path.startswith(f"{start}/"):
                body = form(told)
        return JSONResponse(body, status_code=told.status, headers=told.headers)


def _retry_after_s(error: FrontendError, status: int) -> int | None:
    if error.retry_after_ms is not None:
        return math.ceil(error.retry_after_ms / 1000)
    return DEFAULT_RETRY_AFTER_S if status in (429, 503) else None
