"""Messages are parsed in bounded steps, between which others run."""

import asyncio
import weakref
from itertools import pairwise

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from services.transport.message_limits import MalformedMessageError, MessageLimits
from services.transport.message_reader import (
    INLINE_LIMITS,
    INLINE_MESSAGE_BYTES,
    MessageReader,
    RefusedMessage,
)

LARGE = pb.GenerateRequest(text="x" * (INLINE_LIMITS.max_text_bytes + 1)).SerializeToString()
FULL = pb.GenerateRequest(
    options=pb.GenerationOptions(stop=["a"] * INLINE_MESSAGE_BYTES)
).SerializeToString()
LIMITS = MessageLimits(max_fields=10)


def stream_of(*parts):
    """Returns a function that receives the parts, one at a time."""
    rest = [*parts, grpc.aio.EOF]

    async def receive():
        return rest.pop(0)

    return receive


async def test_a_message_is_parsed():
    reader = MessageReader(LIMITS)
    plain = pb.GenerateRequest(text="x" * (INLINE_MESSAGE_BYTES + 1)).SerializeToString()
    for data in (b"", plain, LARGE):
        read = await reader.read(pb.GenerateRequest.FromString, data)
        assert read == pb.GenerateRequest.FromString(data)
    assert await reader.read(None, b"bytes") == b"bytes"


async def test_what_holds_too_much_is_refused():
    with pytest.raises(MalformedMessageError, match="over 10 fields"):
        await MessageReader(LIMITS).read(pb.GenerateRequest.FromString, FULL)


async def test_large_messages_take_turns_and_others_run_between_them():
    steps = []

    def recording(data):
        steps.append("parsed")
        return pb.GenerateRequest.FromString(data)

    reader = MessageReader(LIMITS)
    recording.__self__ = pb.GenerateRequest  # as FromString has it
    done = asyncio.Event()

    async def others():
        while not done.is_set():
            steps.append("others")
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await asyncio.gather(*(reader.read(recording, LARGE) for _ in range(5)))
    done.set()
    await running
    assert steps.count("parsed") == 5
    at = [index for index, step in enumerate(steps) if step == "parsed"]
    assert all(later - earlier > 1 for earlier, later in pairwise(at))


async def test_a_stream_goes_on_after_a_message_that_holds_too_much():
    reader = MessageReader(LIMITS)
    small = pb.GenerateRequest(text="a").SerializeToString()
    messages = [
        message
        async for message in reader.messages(
            pb.GenerateRequest.FromString, stream_of(small, FULL, small)
        )
    ]
    assert messages[0] == messages[2] == pb.GenerateRequest(text="a")
    assert isinstance(messages[1], RefusedMessage)
    assert messages[1].data is FULL


async def test_a_stream_ends_with_bytes_that_are_no_message():
    reader = MessageReader(LIMITS)
    with pytest.raises(MalformedMessageError, match="cannot be parsed"):
        async for _ in reader.messages(pb.GenerateRequest.FromString, stream_of(b"\xff")):
            pass


async def test_no_message_is_kept_while_a_stream_waits_for_the_next():
    class Parsed:
        def __init__(self, data: bytes) -> None:
            self.data = data

    read, waiting = stream_of(b"a"), asyncio.Event()

    async def receive():
        if (data := await read()) is grpc.aio.EOF:
            await waiting.wait()
        return data

    stream = MessageReader(LIMITS).messages(Parsed, receive)
    first = weakref.ref(await anext(stream))
    following = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    assert first() is None
    waiting.set()
    await following
