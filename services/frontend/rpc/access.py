"""Checks the API keys of gRPC callers."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc

from services.frontend.access.gate import Gate
from services.frontend.errors import UnauthenticatedError
from services.transport.call_scope import scoped

_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""Probes need no key."""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Authenticates each call by its key, `authorization: Bearer KEY`.

    `ErrorInterceptor` must come first: it turns errors into statuses.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_PREFIX):
            return handler
        metadata = handler_call_details.invocation_metadata
        authorizations = [value for name, value in metadata if name == "authorization"]

        def enter(context: grpc.aio.ServicerContext) -> AbstractContextManager[None]:
            try:
                caller = self._gate.authenticate(*authorizations)
            except UnauthenticatedError:
                self._gate.refused.note(method=method, peer=context.peer())
                raise
            return self._gate.acting_as(caller)

        return scoped(handler, enter)
