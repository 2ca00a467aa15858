"""Opens sessions with engines."""

import asyncio
from typing import Any

import grpc

from protos.engine.v1.engine_pb2 import FrontendHello, FrontendMessage
from services.frontend.engine_client.circuit_breaker import CircuitBreaker
from services.frontend.engine_client.prefix_keys import PREFIX_KEY_VERSION
from services.frontend.engine_client.routing_counts import RoutingCounts
from services.frontend.engine_client.session import EngineSession
from services.frontend.errors import EngineUnavailableError
from services.transport.server_status import ServerStatus


async def open_session(
    stub: Any,
    *,
    frontend_id: str,
    breaker: CircuitBreaker,
    max_message_bytes: int,
    max_image_bytes: int,
    counts: RoutingCounts,
    silence_timeout_s: float,
    wants_prefixes: bool = True,
) -> EngineSession:
    """Opens the stream and waits for the engine's hello.

    Raises:
        EngineUnavailableError: the engine sent no hello.
    """
    call = stub.Session()
    status = ServerStatus(call)
    try:
        async with asyncio.timeout(silence_timeout_s):
            hello = FrontendHello(frontend_id=frontend_id)
            if wants_prefixes:
                hello.wants_prefixes = True
                hello.prefix_key_version = PREFIX_KEY_VERSION
            await call.write(FrontendMessage(hello=hello))
            message = await call.read()
    except TimeoutError:
        call.cancel()
        raise EngineUnavailableError(
            f"the engine opens no session: it was silent for {silence_timeout_s} s"
        ) from None
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        code, details = await status.wait()
        raise EngineUnavailableError(
            f"the engine opens no session: {code.name}: {details}"
        ) from None
    if message is grpc.aio.EOF or message.WhichOneof("message") != "hello":
        call.cancel()
        raise EngineUnavailableError("the engine opens no session: it did not say hello")
    return EngineSession(
        call,
        status,
        message.hello,
        breaker=breaker,
        max_message_bytes=max_message_bytes,
        max_image_bytes=max_image_bytes,
        counts=counts,
        silence_timeout_s=silence_timeout_s,
    )
