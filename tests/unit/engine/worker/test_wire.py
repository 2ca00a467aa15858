import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.worker.wire import (
    MAX_MESSAGE_BYTES,
    Channel,
    WireError,
    framed,
    read_message,
)

TOO_LONG = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, Channel(right)


def read_all(stream: bytes, count: int) -> list[bytes]:
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        return [await read_message(reader) for _ in range(count)]

    return asyncio.run(read())


def test_a_message_is_its_length_in_little_endian_and_its_content():
    assert framed(b"abc") == b"\x03\x00\x00\x00abc"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(messages, cut):
    stream = b"".join(map(framed, messages))
    left, right = socket.socketpair()
    with left, right:
        channel = Channel(right)
        received = []
        for start in range(0, len(stream), cut):
            left.sendall(stream[start : start + cut])
            while (message := channel.receive(timeout_s=0)) is not None:
                received.append(message)
    assert received == messages == read_all(stream, len(messages))


def test_both_directions_carry_messages_larger_than_a_chunk(pair):
    left, channel = pair
    content = bytes(range(256)) * 300
    left.sendall(framed(content))
    assert channel.receive() == content
    channel.send(content)
    assert left.recv(4 + len(content), socket.MSG_WAITALL) == framed(content)


def test_a_wait_without_a_message_ends_at_its_timeout(pair):
    assert pair[1].receive(timeout_s=0.001) is None


def test_a_hang_up_raises_on_both_ends(pair):
    left, channel = pair
    left.close()
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(EOFError):
        channel.send(b"x")
    with pytest.raises(EOFError):
        read_all(framed(b"abc")[:-1], 1)


def test_an_oversize_message_is_refused_by_its_length_alone(pair):
    left, channel = pair
    left.sendall(TOO_LONG)
    with pytest.raises(WireError, match="limit"):
        channel.receive()
    with pytest.raises(WireError, match="limit"):
        read_all(TOO_LONG, 1)
