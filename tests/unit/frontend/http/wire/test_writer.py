"""Writing to clients that do not read."""

import asyncio

import pytest

from services.frontend.errors import SlowReaderError
from services.frontend.http.wire.writer import ResponseWriter


async def test_a_client_that_does_not_read_is_cut_without_another_message():
    sent = []

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()
        sent.append(message)

    writer = ResponseWriter(send, timeout_s=0.01, headers={})
    await writer.start_events()
    with pytest.raises(SlowReaderError) as caught:
        await writer.write_event({})
    await writer.fail(caught.value)
    assert [message["type"] for message in sent] == ["http.response.start"]
