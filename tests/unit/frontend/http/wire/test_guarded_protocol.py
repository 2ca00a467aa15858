"""Connections that ask for nothing, for too much or too slowly are closed."""

import asyncio
import contextlib
import json

import pytest

from services.frontend.http.wire import guarded_transport
from services.frontend.http.wire.guarded_protocol import KEEP_ALIVE_S, MAX_HEADER_BYTES, MAX_HEADERS
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.loop_time import LoopTime
from tests.support.waiting import until

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@contextlib.asynccontextmanager
async def listening(engine: FakeEngine | None = None, **config: object):
    async with (
        engine or FakeEngine() as running,
        frontend_stack(running, http_port=0, **config) as stack,
    ):
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


async def sent_until_cut(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Sends pieces without end until the server has had enough; returns the number of bytes."""
    num_bytes = 0
    with contextlib.suppress(ConnectionError):
        while num_bytes < 2**28:
            writer.write(piece)
            await writer.drain()
            num_bytes += len(piece)
    return num_bytes


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
        assert (await end_of(slow)).startswith(b"HTTP/1.1 408") or slow.exception()


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
        assert (await end_of(reader)).startswith(b"HTTP/1.1 408")


async def test_empty_lines_do_not_keep_a_connection_open():
    async with listening() as connect:
        time = LoopTime()
        with time.stopped():
            reader, writer = await connect(HEALTH + b"\r\n")
            assert await answer_of(reader) == b"HTTP/1.1 200 OK"
            writer.write(b"\r\n")
            time.wind(KEEP_ALIVE_S + 1)
            assert await end_of(reader) == b""


async def test_headers_that_are_too_large_or_too_many_are_answered():
    async with listening() as connect:
        reader, _ = await connect(HEALTH + b"a: " + b"b" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n")
        assert (await end_of(reader)).startswith(b"HTTP/1.1 431")
        reader, _ = await connect(HEALTH + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
        assert (await end_of(reader)).startswith(b"HTTP/1.1 431")
        reader, _ = await connect(HEALTH + b"a: " + b"b" * (MAX_HEADER_BYTES // 2) + b"\r\n\r\n")
        assert await answer_of(reader) == b"HTTP/1.1 200 OK"


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"GET /", b"a" * 2**16),
        (HEALTH, b"a: b\r\n" * 1000),
        (HEALTH + b"a: ", b"b" * 2**16),
        (HEALTH + CHUNKED + b"0\r\n", b"a: b\r\n" * 1000),
        (HEALTH + CHUNKED + b"0\r\na: ", b"b" * 2**16),
        (HEALTH + CHUNKED + b"1;", b"b" * 2**16),
        (HEALTH + CHUNKED, b"1\r\n \r\n" * 1000),
        (HEALTH + b"content-length: 999999999\r\n\r\n", b" " * 2**16),
        (b"", (HEALTH + b"\r\n") * 1000),
        (b"", b"\r\n" * 1000),
        (b"", b"\0" * 2**16),
        (HEALTH + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", b"x" * 2**16),
        (POST + CHUNKED, b"1\r\n \r\n" * 1000),
        (POST + CHUNKED, b"1;" + b"a" * 99 + b"\r\n \r\n"),
        (POST + CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n" * 1000),
        (POST + CHUNKED, b"0" * 2**16),
        (POST + b"expect: 100-continue\r\n" + CHUNKED, b"1\r\n \r\n" * 1000),
        (POST + b"content-length: 999999999\r\n\r\n", b" " * 2**16),
    ],
)
async def test_input_without_end_is_cut(head, piece):
    async with listening(max_message_bytes=2**16) as connect:
        with LoopTime().stopped():  # by its size alone
            _, writer = await connect(head)
            assert await sent_until_cut(writer, piece) < 2**28
            other, _ = await connect(HEALTH + b"\r\n")
            assert await answer_of(other) == b"HTTP/1.1 200 OK"


async def test_a_body_in_small_chunks_with_trailers_is_read():
    body = json.dumps({"model": "fake", "prompt": "one two"}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    async with listening() as connect:
        reader, _ = await connect(
            POST + CHUNKED + chunks + b"0\r\ncontent-type: text/plain\r\n\r\n"
        )
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_the_connection(stream):
    body = json.dumps({"model": "fake", "prompt": "one two", "stream": stream}).encode()
    async with listening() as connect:
        reader, _ = await connect(
            b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
            b"connection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        head, _, content = (await end_of(reader)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if stream:
        content = content.removesuffix(b"\n\ndata: [DONE]\n\n").split(b"\n\n")[-1]
        content = content.removeprefix(b"data: ")
    [choice] = json.loads(content)["choices"]
    assert choice["finish_reason"] == "stop"


async def test_an_answer_of_known_length_to_http_1_0_is_whole():
    async with listening() as connect:
        reader, _ = await connect(b"GET /health HTTP/1.0\r\n\r\n")
        head, _, content = (await end_of(reader)).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(content) in head
    assert content == b'{"status":"ok"}'


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEALTH, b"200"),
        (b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n", b"200"),
        (b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\n", b"404"),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\n", b"405"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n", b"415"),
        (b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\n", b"415"),
    ],
)
async def test_an_answer_before_the_body_has_come_ends_the_connection(head, status, monkeypatch):
    monkeypatch.setattr(guarded_transport, "LINGER_S", 0)
    async with listening() as connect:
        reader, writer = await connect(head + b"content-length: 1000\r\n\r\n")
        answer = await end_of(reader)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in answer
        async with asyncio.timeout(60):
            assert await sent_until_cut(writer, b" ") < 2**28


async def test_an_answer_reaches_a_client_that_sends_its_whole_body_first():
    async with listening(max_message_bytes=2**20) as connect:
        reader, writer = await connect(
            b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
        )
        with LoopTime().stopped():
            writer.write(b" " * 1_000_000)
            await writer.drain()
            assert (await end_of(reader)).startswith(b"HTTP/1.1 404")


async def test_a_body_of_the_client_that_is_refused_as_no_http_ends_the_request():
    async with listening() as connect:
        reader, _ = await connect(POST + CHUNKED + b"what\r\n")
        assert (await end_of(reader)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n",
        HEALTH + b"host: y\r\n",
        HEALTH + b"Host: x\r\n",
        b"GET /health HTTP/1.0\r\nhost: x\r\nhost: y\r\n",
        HEALTH + b"transfer-encoding: gzip, chunked\r\n",
        HEALTH + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        HEALTH + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        HEALTH + b"transfer-encoding: chunked, identity\r\n",
        HEALTH + b"transfer-encoding: identity\r\n",
        HEALTH + b"transfer-encoding:\r\n",
        b"GET /health HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n",
    ],
)
async def test_a_head_that_two_readers_may_understand_differently_is_refused(head):
    async with listening() as connect:
        reader, _ = await connect(head + b"\r\n0\r\n\r\n")
        assert (await end_of(reader)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "head",
    [
        HEALTH + b"transfer-encoding: Chunked\r\n",
        b"GET /health HTTP/1.1\r\nHOST: localhost\r\n",
        b"GET /health HTTP/1.0\r\n",
    ],
)
async def test_a_head_with_one_host_or_in_http_1_0_with_none_is_answered(head):
    async with listening() as connect:
        reader, _ = await connect(head + b"\r\n0\r\n\r\n")
        assert await answer_of(reader) == b"HTTP/1.1 200 OK"


async def test_a_request_sent_before_the_answer_to_another_is_not_served():
    body = b'{"model": "fake", "prompt": "one two"}'
    async with listening() as connect:
        reader, _ = await connect(
            POST + b"content-length: %d\r\n\r\n" % len(body) + body + HEALTH + b"\r\n"
        )
        answer = await end_of(reader)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer
    assert b"hello world" in answer


async def test_a_client_that_pipelines_and_goes_away_cancels_its_request():
    body = b'{"model": "fake", "prompt": "one two"}'
    engine = FakeEngine()
    engine.pause()
    async with listening(engine) as connect:
        _, writer = await connect(
            POST + b"content-length: %d\r\n\r\n" % len(body) + body + HEALTH + b"\r\n"
        )
        await until(lambda: engine.live)
        writer.transport.abort()
        await until(lambda: not engine.live)


async def test_an_idle_connection_gives_way_to_a_new_one_and_a_busy_one_does_not():
    body = b'{"model": "fake", "prompt": "one two"}'
    post = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    engine = FakeEngine()
    engine.pause()
    async with listening(engine, max_connections=2) as connect:
        busy, _ = await connect(post)
        await until(lambda: len(engine.live) == 1)
        idle, _ = await connect(HEALTH + b"\r\n")
        assert await answer_of(idle) == b"HTTP/1.1 200 OK"
        also_busy, _ = await connect(post)
        assert await end_of(idle) == b""
        await until(lambda: len(engine.live) == 2)
        refused, _ = await connect(HEALTH + b"\r\n")
        assert await end_of(refused) == b""
        engine.resume()
        assert await busy.readline() == await also_busy.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_connections_of_one_address_have_a_limit_of_their_own():
    async with listening(max_connections_per_address=1) as connect:
        with LoopTime().stopped():
            first, _ = await connect(HEALTH + b"\r\n")
            assert await answer_of(first) == b"HTTP/1.1 200 OK"
            second, _ = await connect(HEALTH + b"\r\n")
            assert await end_of(first) == b""
            assert await answer_of(second) == b"HTTP/1.1 200 OK"


async def test_a_body_of_nested_lists_is_refused():
    body = b'{"model": "fake", "prompt": ' + b"[" * 100_000
    async with listening() as connect:
        reader, _ = await connect(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
