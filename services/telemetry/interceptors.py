"""The one place where an exception becomes a gRPC status."""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from services.telemetry.status import Status, StatusMapper

log = structlog.get_logger()

_HANDLER_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""Attribute and constructor of a method handler, by (request_streaming, response_streaming)."""

_Parse = Callable[[bytes], Any]


class MalformedMessageError(Exception):
    """What came is not a message of the method's type."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Turns what a servicer raises into a status.

    Errors that the mapper knows keep their message. Anything else is our own bug: the caller sees
    INTERNAL with an id, the log has the rest under the same id.

    A message that cannot be parsed is the caller's mistake: INVALID_ARGUMENT. gRPC itself would
    parse a single request before anything of ours runs, and call a failure of it an unknown error.

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
        kind, make = _HANDLER_KINDS[handler.request_streaming, handler.response_streaming]
        inner, parse = getattr(handler, kind), _parser(handler.request_deserializer)
        wrap = self._wrap_generator if inspect.isasyncgenfunction(inner) else self._wrap_coroutine
        if handler.request_streaming:
            method = wrap(inner, handler_call_details.method, None)
            return make(method, parse, handler.response_serializer)
        method = wrap(inner, handler_call_details.method, parse)
        return make(method, None, handler.response_serializer)

    def _wrap_coroutine(self, inner: Any, method: str, parse: _Parse | None) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await inner(parse(request) if parse else request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
                self._fail(context, error, method)

        return call

    def _wrap_generator(self, inner: Any, method: str, parse: _Parse | None) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                async for response in inner(parse(request) if parse else request, context):
                    yield response
            except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
                self._fail(context, error, method)

        return call

    def _fail(self, context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
        status = self._mapper(error)
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


def _parser(deserialize: _Parse | None) -> _Parse:
    """Returns what makes messages of bytes, and says in words of ours when it cannot."""

    def parse(data: bytes) -> Any:
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except DecodeError:
            raise MalformedMessageError("the message cannot be parsed") from None

    return parse


def internal_status(error: BaseException, **facts: Any) -> Status:
    """Logs an error that callers may not see and returns the status they get instead."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal_error", error_id=error_id, exc_info=error, **facts)
    return Status(grpc.StatusCode.INTERNAL, f"internal error {error_id}")
