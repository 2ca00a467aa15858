"""How exceptions of each kind of method become statuses."""

from contextlib import asynccontextmanager

import grpc
import pytest
import structlog
from google.protobuf.struct_pb2 import Struct

from services.transport.counts import LocalCounts
from services.transport.grpc_options import ServerLimits
from services.transport.interceptors import ErrorInterceptor
from services.transport.requests import RequestReceiver
from services.transport.status import Status


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
    if request == b"gone":
        raise grpc.aio.InternalError("cannot send")
    if request == b"bug":
        raise KeyError("secret")


class Methods(grpc.GenericRpcHandler):
    def service(self, details):
        return {
            "/t/unary": grpc.unary_unary_rpc_method_handler(unary),
            "/t/generator": grpc.unary_stream_rpc_method_handler(generator),
            "/t/coroutine": grpc.unary_stream_rpc_method_handler(coroutine),
            "/t/collecting": grpc.stream_unary_rpc_method_handler(collecting),
            "/t/parsing_unary": grpc.unary_unary_rpc_method_handler(
                unary, Struct.FromString, Struct.SerializeToString
            ),
            "/t/parsing_generator": grpc.unary_stream_rpc_method_handler(
                generator, Struct.FromString, Struct.SerializeToString
            ),
            "/t/parsing_collecting": grpc.stream_unary_rpc_method_handler(
                collecting, Struct.FromString
            ),
        }.get(details.method)


@asynccontextmanager
async def serving():
    limits = ServerLimits(
        max_request_bytes=2**20,
        max_connections=8,
        max_streams_per_connection=8,
        max_sessions=8,
        slow_reader_timeout_s=60,
    )
    receiver = RequestReceiver(limits, LocalCounts())
    server = grpc.aio.server(interceptors=[ErrorInterceptor(mapper), receiver])
    server.add_generic_rpc_handlers((Methods(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(channel, method, request):
    if method.endswith("unary"):
        return [await channel.unary_unary(f"/t/{method}")(request)]
    if method.endswith("collecting"):
        return [await channel.stream_unary(f"/t/{method}")(iter([request]))]
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


@pytest.mark.parametrize("method", ["parsing_unary", "parsing_generator", "parsing_collecting"])
async def test_a_message_that_cannot_be_parsed_is_the_callers_mistake(method):
    async with serving() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(channel, method, b"\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "the message cannot be parsed"


async def test_a_message_is_parsed_once_and_handed_over():
    request = Struct()
    request["key"] = "value"
    async with serving() as channel:
        answer = await channel.unary_unary("/t/parsing_unary")(request.SerializeToString())
    assert Struct.FromString(answer) == request


@METHODS
async def test_a_write_that_fails_is_a_caller_that_went_away(method):
    async with serving() as channel:
        with (
            structlog.testing.capture_logs() as logs,
            pytest.raises(grpc.aio.AioRpcError) as error,
        ):
            await call(channel, method, b"gone")
    assert error.value.code() is grpc.StatusCode.CANCELLED
    assert logs == []
