"""What one client or one model can take from the others is bounded."""

import asyncio

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.loop_time import LoopTime
from tests.support.waiting import until

SLEEPLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
REQUEST = pb.GenerateRequest(text="one two")
CHAT = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])


async def text_of(call: grpc.aio.UnaryStreamCall) -> str:
    return "".join([response.output.text async for response in call])


async def served(stub: FrontendServiceStub) -> str:
    """Calls until it is served: one that takes the place of another too soon is turned away."""
    while True:
        try:
            return await text_of(stub.Generate(REQUEST))
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE  # noqa: PT017  or it is ours


async def test_a_connection_has_only_so_many_calls_and_the_others_wait_for_them():
    engine = FakeEngine()
    engine.pause()
    async with engine, frontend_stack(engine, max_streams_per_connection=2) as stack:
        calls = [asyncio.create_task(served(stack.stub)) for _ in range(5)]
        await until(lambda: len(engine.live) == 2)
        # Whoever comes over another connection is served at once.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
            await FrontendServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert len(engine.live) == 2
        engine.resume()
        assert await asyncio.gather(*calls) == ["hello world"] * 5


async def test_a_connection_over_the_limit_is_closed():
    async with FakeEngine() as engine, frontend_stack(engine, max_connections=1) as stack:
        await stack.stub.ListModels(pb.ListModelsRequest())
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await channel.channel_ready()
        await stack.stub.ListModels(pb.ListModelsRequest())


async def test_a_template_without_end_costs_its_own_requests_and_no_other_stream():
    files = tokenizer_files(chat_template=SLEEPLESS)
    async with (
        FakeEngine(files=files) as engine,
        frontend_stack(engine, template_timeout_s=3600) as stack,
    ):
        time = LoopTime()
        chats = [stack.stub.Chat(CHAT) for _ in range(3)]
        ends = asyncio.gather(*(text_of(call) for call in chats), return_exceptions=True)
        await until(lambda: stack.server.requests.counts.num_live == 3)
        while not ends.done():
            for _ in range(4):
                assert await text_of(stack.stub.Generate(REQUEST)) == "hello world"
            time.wind(3600)
            await asyncio.sleep(0)
        codes = {error.code() for error in await ends}
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
