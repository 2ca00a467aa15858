"""Many requests over one stream, against a frontend that echoes."""

import asyncio

import pytest

from services.client import errors
from services.client.client import OctavoClient
from services.client.requests import Message, Options, Sampling
from services.client.responses import FinishReason
from tests.support.fake_frontend import FakeFrontend


@pytest.fixture
async def fake():
    async with FakeFrontend() as frontend:
        yield frontend


@pytest.fixture
async def session(fake):
    async with OctavoClient(fake.address) as client, client.session() as entered:
        yield entered


async def test_requests_share_the_stream_and_keep_their_own_output(session):
    streams = [session.generate(f"request number {i}") for i in range(20)]
    completions = await asyncio.gather(*(stream.completion() for stream in streams))
    assert [c.text for c in completions] == [f"request number {i}" for i in range(20)]


async def test_a_conversation_is_answered(session):
    stream = session.chat([Message(role="user", content="hello")])
    assert (await stream.completion()).text == "hello"


async def test_a_prompt_sent_in_parts_is_one_prompt(session):
    stream = await session.generate_parts(["one ", "two ", "three"])
    assert (await stream.completion()).text == "one two three"


async def test_parts_may_come_from_an_async_source(session):
    async def source():
        for part in ("a ", "b"):
            await asyncio.sleep(0)
            yield part

    assert (await (await session.generate_parts(source())).completion()).text == "a b"


async def test_one_failure_leaves_the_others_alone(session):
    failing, fine = session.generate("FAIL"), session.generate("all well")
    with pytest.raises(errors.OverloadedError) as caught:
        await failing.completion()
    assert caught.value.retry_after_s == 0.25
    assert (await fine.completion()).text == "all well"


async def test_cancel_ends_one_request_with_aborted(session, fake):
    hanging, fine = session.generate("HANG on"), session.generate("all well")
    assert (await anext(hanging)).text == "HANG"
    hanging.cancel()
    assert (await anext(hanging)).finish_reason is FinishReason.ABORTED
    assert (await fine.completion()).text == "all well"


async def test_cancel_after_the_end_does_nothing(session):
    stream = session.generate("done", Options(sampling=Sampling(max_tokens=1)))
    await stream.completion()
    stream.cancel()
    assert (await session.generate("next").completion()).text == "next"


async def test_leaving_the_session_ends_its_requests(fake):
    async with OctavoClient(fake.address) as client:
        async with client.session() as session:
            stream = session.generate("HANG on")
            await anext(stream)
        with pytest.raises(errors.CancelledError):
            await anext(stream)


async def test_a_session_that_the_server_ends_fails_live_and_later_requests(session):
    live = session.generate("HANG on")
    await anext(live)
    session.generate("END")
    with pytest.raises(errors.OctavoError):
        await anext(live)
    with pytest.raises(errors.OctavoError):
        session.generate("more")
