"""Connections that ask for nothing, or for too much, are closed."""

import asyncio
import contextlib

from services.frontend.http.guarded_protocol import MAX_HEADER_BYTES
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.loop_time import LoopTime

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@contextlib.asynccontextmanager
async def listening(**config: object):
    async with FakeEngine() as engine, frontend_stack(engine, http_port=0, **config) as stack:
        port = stack.server.http_port
        writers = []

        async def connect(sent: bytes = b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(sent)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in writers:
                writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """Everything up to the end of a connection, which the server is to close."""
    async with asyncio.timeout(60):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    await reader.readexactly(int(length.split(b":")[1]))
    return head.split(b"\r\n")[0]


async def test_headers_that_do_not_come_in_time_close_the_connection():
    async with listening(http_header_timeout_s=0.1) as connect:
        silent, _ = await connect()
        slow, writer = await connect(HEALTH)
        assert await end_of(silent) == b""
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"a: b\r\n")
                await writer.drain()
                await asyncio.sleep(0.005)
        assert await end_of(slow) == b""


async def test_a_second_request_on_a_connection_has_its_own_time():
    async with listening(http_header_timeout_s=0.3) as connect:
        time = LoopTime()
        with time.stopped():
            reader, writer = await connect(HEALTH + b"\r\n")
            assert await answer_of(reader) == b"HTTP/1.1 200 OK"
            time.wind(0.4)  # what is over has no timer
            for _ in range(5):
                await asyncio.sleep(0)
            writer.write(HEALTH + b"\r\n")
            assert await answer_of(reader) == b"HTTP/1.1 200 OK"
        writer.write(HEALTH)
        assert await end_of(reader) == b""


async def test_headers_without_end_close_the_connection_before_they_fill_memory():
    async with listening() as connect:
        reader, writer = await connect(HEALTH + b"a: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"b" * MAX_HEADER_BYTES)
                await writer.drain()
        assert await end_of(reader) == b""


async def test_headers_that_are_too_large_are_answered():
    async with listening() as connect:
        reader, _ = await connect(HEALTH + b"a: " + b"b" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n")
        assert b"200 OK" not in await end_of(reader)
        reader, _ = await connect(HEALTH + b"a: " + b"b" * (MAX_HEADER_BYTES // 2) + b"\r\n\r\n")
        assert await answer_of(reader) == b"HTTP/1.1 200 OK"


async def test_connections_over_the_limit_are_closed_and_places_come_back():
    async with listening(max_connections=2) as connect:
        with LoopTime().stopped():  # else the first two may be closed for doing nothing
            first, writer = await connect(HEALTH + b"\r\n")
            second, _ = await connect(HEALTH + b"\r\n")
            assert await answer_of(first) == await answer_of(second) == b"HTTP/1.1 200 OK"
            third, _ = await connect(HEALTH + b"\r\n")
            assert await end_of(third) == b""
        writer.close()
        async with asyncio.timeout(60):
            while True:
                again, _ = await connect(HEALTH + b"\r\n")
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    if await answer_of(again) == b"HTTP/1.1 200 OK":
                        break


async def test_a_body_of_nested_lists_is_refused():
    body = b'{"model": "fake", "prompt": ' + b"[" * 100_000
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
    async with listening() as connect:
        reader, _ = await connect(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
