"""The one place where an exception becomes a gRPC status."""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import structlog

from services.telemetry.message_limits import MalformedMessageError
from services.telemetry.message_reader import MessageReader
from services.telemetry.status import Status, StatusMapper

log = structlog.get_logger()

_HANDLER_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""Attribute and constructor of a method handler, by (request_streaming, response_streaming)."""

_Read = Callable[[Any], Any]
"""Makes messages of what gRPC hands over: one to be awaited, or an iterator of a stream's."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Turns what a servicer raises into a status.

    Errors that the mapper knows keep their message. Anything else is our own bug: the caller sees
    INTERNAL with an id, the log has the rest under the same id.

    Messages come as bytes, and the reader parses them. One that cannot be parsed, or holds too
    much, is the caller's mistake: INVALID_ARGUMENT. gRPC itself would parse any message before
    anything of ours runs, and call a failure of it an unknown error.

    A streaming method may be an async generator or a coroutine that calls `context.write`; the
    latter costs nothing here per message.
    """

    def __init__(self, mapper: StatusMapper, reader: MessageReader | None = None) -> None:
        self._mapper = mapper
        self._reader = reader or MessageReader()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method; grpc answers UNIMPLEMENTED
            return None
        kind, make = _HANDLER_KINDS[handler.request_streaming, handler.response_streaming]
        inner = getattr(handler, kind)
        wrap = self._wrap_generator if inspect.isasyncgenfunction(inner) else self._wrap_coroutine
        read = self._reader.messages if handler.request_streaming else self._reader.read
        method = wrap(
            inner, handler_call_details.method, partial(read, handler.request_deserializer)
        )
        return make(method, None, handler.response_serializer)

    def _wrap_coroutine(self, inner: Any, method: str, read: _Read) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await inner(await _taken(read, request), context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
                await self._abort(context, error, method)

        return call

    def _wrap_generator(self, inner: Any, method: str, read: _Read) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                async for response in inner(await _taken(read, request), context):
                    yield response
            except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
                await self._abort(context, error, method)

        return call

    async def _abort(
        self, context: grpc.aio.ServicerContext, error: Exception, method: str
    ) -> None:
        status = self._mapper(error)
        if isinstance(error, MalformedMessageError):
            status = Status(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, grpc.aio.InternalError):  # a write failed before we were cancelled
            status = Status(grpc.StatusCode.CANCELLED, "the caller is gone")
        if status is None:
            status = internal_status(error, method=method)
        await context.abort(status.code, status.message, status.trailing_metadata)


async def _taken(read: _Read, request: Any) -> Any:
    """Returns a call's message, or the iterator of its messages."""
    taken = read(request)
    return await taken if inspect.isawaitable(taken) else taken


def internal_status(error: BaseException, **facts: Any) -> Status:
    """Logs an error that callers may not see and returns the status they get instead."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal_error", error_id=error_id, exc_info=error, **facts)
    return Status(grpc.StatusCode.INTERNAL, f"internal error {error_id}")
