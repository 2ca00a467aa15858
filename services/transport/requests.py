"""Receives the requests of calls inside limits."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc

from services.transport.call_scope import handler_kind
from services.transport.callers import Party, by_address, by_connection
from services.transport.counts import Counts
from services.transport.grpc_options import ServerLimits
from services.transport.held_counts import holding
from services.transport.message_limits import MalformedMessageError
from services.transport.message_reader import MessageReader
from services.transport.receive_slots import ReceiveSlots

RECEIVE_BYTES = 256 * 2**20
"""Most memory of incomplete messages of calls that carry one request."""
MIN_SLOTS = 8
RECEIVE_TIMEOUT_S = 30.0
RECEIVE_FAIR_S = 1.0
OPEN_PREFIX = "/grpc.health.v1.Health/"
"""Methods that need neither key nor name; their messages are a few bytes."""
OPEN_SLOTS = 32
OPEN_TIMEOUT_S = 5.0

_Method = Callable[[Any, grpc.aio.ServicerContext], Any]


class RequestReceiver(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Receives the request of a call under a slot, and counts streams of requests.

    Place it innermost, so that callers are checked before it reads. gRPC itself would read the
    request of a unary call before any code of ours runs, up to the largest message for each of a
    connection's streams. On the wire a unary request is a stream of one message, so such methods
    are served as streams here. Later messages are not read, so they stay within the stream's
    window.
    """

    def __init__(self, limits: ServerLimits, counts: Counts, party: Party = by_address) -> None:
        """Sets the limits.

        Args:
            limits: limits of messages and streams.
            counts: where slots and streams are counted.
            party: names the caller that a call counts against.
        """
        self._limits = limits
        self._reader = MessageReader(limits.message)
        self._counts = counts
        self._party = party
        self._slots = ReceiveSlots(
            counts,
            "receiving",
            max_slots=max(MIN_SLOTS, RECEIVE_BYTES // limits.max_request_bytes),
            timeout_s=RECEIVE_TIMEOUT_S,
            fair_s=RECEIVE_FAIR_S,
        )
        # A probe's message comes with its metadata. So the newest call gets a slot at once, and
        # the oldest one of the connection with the most gives way.
        self._open_slots = ReceiveSlots(
            counts,
            "receiving open",
            max_slots=OPEN_SLOTS,
            timeout_s=OPEN_TIMEOUT_S,
            fair_s=0.0,
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method; grpc answers UNIMPLEMENTED
            return None
        if handler.request_streaming:
            return self._streaming(handler)
        is_open = handler_call_details.method.startswith(OPEN_PREFIX)
        slots = self._open_slots if is_open else self._slots
        party = by_connection if is_open else self._party
        inner = getattr(handler, handler_kind(handler))

        async def receive(context: grpc.aio.ServicerContext) -> Any:
            async with slots.hold(party(context)):
                data = await context.read()
            if data is grpc.aio.EOF:
                raise MalformedMessageError("the call has no message")
            return await self._reader.read(handler.request_deserializer, data)

        async def call(_: Any, context: grpc.aio.ServicerContext) -> Any:
            return await inner(await receive(context), context)

        async def generate(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for response in inner(await receive(context), context):
                yield response

        method: _Method = generate if inspect.isasyncgenfunction(inner) else call
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(method, None, handler.response_serializer)

    def _streaming(self, handler: Any) -> Any:
        """Returns the handler of a stream of requests, each call of which is counted."""
        kind = handler_kind(handler)
        inner, parse = getattr(handler, kind), handler.request_deserializer

        async def call(_: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._session(context):
                return await inner(self._reader.messages(parse, context.read), context)

        async def generate(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._session(context):
                async for response in inner(self._reader.messages(parse, context.read), context):
                    yield response

        return handler._replace(
            request_deserializer=None,
            **{kind: generate if inspect.isasyncgenfunction(inner) else call},
        )

    def _session(self, context: grpc.aio.ServicerContext) -> AbstractContextManager[None]:
        limits = self._limits
        return holding(
            self._counts,
            ("sessions", limits.max_sessions),
            (f"sessions/{self._party(context)}", limits.max_sessions_per_caller),
        )
