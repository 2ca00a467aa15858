"""Checks the API keys of HTTP callers."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.access.gate import Gate
from services.frontend.errors import UnauthenticatedError
from services.frontend.http.wire.error_forms import error_response
from services.frontend.http.wire.status import http_error_of

_OPEN_PATHS = {"/", "/health", "/ping"}
"""The start page and probes need no key."""


class RequireKey:
    """An ASGI application that authenticates requests to another application."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._gate.authenticate(*_authorizations(Headers(scope=scope)))
        except UnauthenticatedError as error:
            host = (scope["client"] or ("",))[0]
            self._gate.refused.note(method=scope["method"], peer=host)
            await _refusal(scope["path"], error)(scope, receive, send)
            return
        with self._gate.acting_as(caller):
            await self._app(scope, receive, send)


def _authorizations(headers: Headers) -> list[str]:
    """Returns the headers, or the same with keys that came as x-api-key, as Anthropic's do."""
    keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
    return headers.getlist("authorization") or keys


def _refusal(path: str, error: UnauthenticatedError) -> JSONResponse:
    response = error_response(path, http_error_of(error))
    response.headers["www-authenticate"] = "Bearer"
    return response
