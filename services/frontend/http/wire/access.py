"""Decides which requests reach the application: by their host, origin and key."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.access.gate import Gate
from services.frontend.errors import UnauthenticatedError
from services.frontend.http.wire.status import ErrorForms, RefusedCallError
from services.transport.hosts import AllowedHosts
from services.transport.refused_calls import RefusedCalls

MAX_AGE_S = 600
"""Time for which browsers need not ask again."""
_OPEN_PATHS = {"/", "/health", "/ping"}
"""The start page and probes need no key."""


class RequireHost:
    """An ASGI application that passes on requests with an allowed Host to another."""

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, refused: RefusedCalls, errors: ErrorForms
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._refused = refused
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        host = Headers(scope=scope).get("host")
        if host is None or self._hosts.allow(host):
            await self._app(scope, receive, send)
            return
        peer = (scope["client"] or ("",))[0]
        self._refused.note_host(host, method=scope["method"], peer=peer)
        refusal = RefusedCallError(403, "this host is not answered; --allowed-hosts names more")
        await self._errors.response(scope["path"], refusal)(scope, receive, send)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns the application with Starlette's answers to browsers; "*" allows all origins.

    Keys come in a header that pages set themselves, so no cookies are allowed.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["retry-after", "x-request-id", "request-id"],
        max_age=MAX_AGE_S,
    )


class RequireKey:
    """An ASGI application that authenticates requests to another application."""

    def __init__(self, app: ASGIApp, gate: Gate, errors: ErrorForms) -> None:
        self._app = app
        self._gate = gate
        self._errors = errors

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
            response = self._errors.response(scope["path"], error)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        with self._gate.acting_as(caller):
            await self._app(scope, receive, send)


def _authorizations(headers: Headers) -> list[str]:
    """Returns the headers, or the same with keys that came as x-api-key, as Anthropic's do."""
    keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
    return headers.getlist("authorization") or keys
