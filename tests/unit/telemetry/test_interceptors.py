"""How exceptions of each kind of method become statuses."""

from contextlib import asynccontextmanager

import grpc
import pytest

from services.telemetry.interceptors import ErrorInterceptor
from services.telemetry.status import Status


class FullError(Exception):
    """An error that callers may know."""


def mapper(error):
    if isinstance(error, FullError):
        return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), 300)
    return None


async def unary(request, context):
    raise_what(request)
    return request


async def generator(request, context):
    yield request
    raise_what(request)


async def coroutine(request, context):
    await context.write(request)
    raise_what(request)


async def collecting(requests, context):
    async for request in requests:
        raise_what(request)
    return b"done"


def raise_what(request):
    if request == b"full":
        raise FullError("no room")
    if request == b"bug":
        raise KeyError("secret")


class Methods(grpc.GenericRpcHandler):
    def service(self, details):
        return {
            "/t/unary": grpc.unary_unary_rpc_method_handler(unary),
            "/t/generator": grpc.unary_stream_rpc_method_handler(generator),
            "/t/coroutine": grpc.unary_stream_rpc_method_handler(coroutine),
            "/t/collecting": grpc.stream_unary_rpc_method_handler(collecting),
        }.get(details.method)


@asynccontextmanager
async def serving():
    server = grpc.aio.server(interceptors=[ErrorInterceptor(mapper)])
    server.add_generic_rpc_handlers((Methods(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(channel, method, request):
    if method == "unary":
        return [await channel.unary_unary("/t/unary")(request)]
    if method == "collecting":
        return [await channel.stream_unary("/t/collecting")(iter([request]))]
    return [response async for response in channel.unary_stream(f"/t/{method}")(request)]


METHODS = pytest.mark.parametrize("method", ["unary", "generator", "coroutine", "collecting"])


@METHODS
async def test_what_raises_nothing_passes(method):
    async with serving() as channel:
        assert len(await call(channel, method, b"ok")) == 1


@METHODS
async def test_a_known_error_keeps_its_message_and_pushback(method):
    async with serving() as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="no room") as error:
            await call(channel, method, b"full")
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.value.trailing_metadata()) == {"grpc-retry-pushback-ms": "300"}


@METHODS
async def test_a_bug_shows_an_id_and_nothing_else(method):
    async with serving() as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"internal error [0-9a-f]{12}") as error:
            await call(channel, method, b"bug")
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.value.details()


async def test_an_unknown_method_is_unimplemented():
    async with serving() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/t/other")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
