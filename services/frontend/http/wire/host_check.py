"""Refuses requests under names that are not the server's."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.http.wire.error_forms import error_response
from services.frontend.http.wire.status import RefusedCallError, http_error_of
from services.transport.hosts import AllowedHosts


class RequireHost:
    """An ASGI application that passes on requests with an allowed Host to another."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if self._hosts.allow(Headers(scope=scope).get("host")):
            await self._app(scope, receive, send)
            return
        told = http_error_of(
            RefusedCallError(403, "this host is not answered; --allowed-hosts names more")
        )
        await error_response(scope["path"], told)(scope, receive, send)
