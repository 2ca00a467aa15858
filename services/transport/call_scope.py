"""Runs every call of a method inside a context manager."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc

Scope = Callable[[grpc.aio.ServicerContext], AbstractContextManager[None]]


def scoped(handler: Any, scope: Scope) -> Any:
    """Returns a method's handler whose calls run inside `scope`.

    If the scope raises on entry, the call ends before its servicer sees it.

    Args:
        handler: an `RpcMethodHandler`; its method is a coroutine or an async generator.
        scope: makes a context manager for one call.
    """
    kind = handler_kind(handler)
    inner = getattr(handler, kind)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with scope(context):
            return await inner(request, context)

    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with scope(context):
            async for response in inner(request, context):
                yield response

    return handler._replace(**{kind: generate if inspect.isasyncgenfunction(inner) else call})


def handler_kind(handler: Any) -> str:
    """Returns the name of the attribute in which a handler has its method."""
    return "_".join(
        "stream" if is_stream else "unary"
        for is_stream in (handler.request_streaming, handler.response_streaming)
    )
