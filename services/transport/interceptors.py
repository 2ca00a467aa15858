"""The one place where an exception becomes a gRPC status."""

import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import structlog

from services.transport.call_scope import scoped
from services.transport.message_limits import MalformedMessageError
from services.transport.status import RefusedCallError, Status, StatusMapper

log = structlog.get_logger()


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Turns what a servicer raises into a status.

    Errors that the mapper knows keep their message. Anything else is our own bug: the caller sees
    INTERNAL with an id, the log has the rest under the same id.

    A streaming method may be an async generator or a coroutine that calls `context.write`; the
    latter costs nothing here per message.
    """

    def __init__(self, mapper: StatusMapper) -> None:
        self._mapper = mapper

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method; grpc answers UNIMPLEMENTED
            return None
        method = handler_call_details.method
        return scoped(handler, lambda context: self._answering(context, method))

    @contextmanager
    def _answering(self, context: grpc.aio.ServicerContext, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  the edge: every error becomes a status
            self._fail(context, error, method)

    def _fail(self, context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
        status = self._mapper(error)
        if isinstance(error, RefusedCallError):
            status = error.status
        if isinstance(error, MalformedMessageError):
            status = Status(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, grpc.aio.InternalError):  # a write failed before we were cancelled
            status = Status(grpc.StatusCode.CANCELLED, "the caller is gone")
        if status is None:
            status = internal_status(error, method=method)
        # Not context.abort: gRPC keeps the exception that it raises with the call, and with it the
        # frames that hold the request. That cycle waits for the garbage collector.
        context.set_code(status.code)
        context.set_details(status.message)
        context.set_trailing_metadata(status.trailing_metadata)


def internal_status(error: BaseException, **facts: Any) -> Status:
    """Logs an error that callers may not see and returns the status they get instead."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal_error", error_id=error_id, exc_info=error, **facts)
    return Status(grpc.StatusCode.INTERNAL, f"internal error {error_id}")
