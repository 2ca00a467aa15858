"""Limits on the share that one client or one model can take from the others."""

import asyncio

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams, StructuredOutput, TextChoice
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


async def test_calls_of_a_connection_are_limited_and_others_wait():
    engine = FakeEngine()
    engine.pause()
    async with engine, frontend_stack(engine, max_streams_per_connection=2) as stack:
        calls = [asyncio.create_task(served(stack.stub)) for _ in range(5)]
        await until(lambda: len(engine.live) == 2)
        # A call over another connection is served at once.
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
    # The next conversation in turn starts a process again, which the wound time may give no time.
    assert codes <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    }
    assert grpc.StatusCode.INVALID_ARGUMENT in codes


async def refusal_of(call: grpc.aio.UnaryStreamCall) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error.value.details()


async def test_what_a_message_holds_is_bounded_before_anything_is_made_of_it():
    call = pb.ToolCall(name="a", arguments='{"x": [' + "{}," * 40_000 + "{}]}")
    message = pb.ChatMessage(role="assistant", tool_calls=[call])
    empty = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 1800)
    ids = [1] * 2**20
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        stub = stack.stub
        assert "over 16384 fields" in await refusal_of(
            stub.Chat(pb.ChatRequest(messages=[empty] * 700))
        )
        assert "the arguments of tool calls hold over 32768 values" in await refusal_of(
            stub.Chat(pb.ChatRequest(messages=[message]))
        )
        assert "the prompt is too long: 1048576 tokens" in await refusal_of(
            stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=ids)))
        )
        assert await served(stub) == "hello world"


async def test_what_is_sent_on_to_the_engine_is_bounded_here():
    def wish(**sampling) -> pb.GenerateRequest:
        options = pb.GenerationOptions(sampling=SamplingParams(**sampling))
        return pb.GenerateRequest(text="a", options=options)

    choice = StructuredOutput(choice=TextChoice(texts=["a"] * 1025))
    regex = StructuredOutput(regex="a" * (2**20 + 1))
    refusals = {
        "logit_bias has 1025 entries; the limit is 1024": wish(
            logit_bias=dict.fromkeys(range(1025), 1.0)
        ),
        "stop_token_ids has 65 entries; the limit is 64": wish(stop_token_ids=[1] * 65),
        "structured_output.choice has 1025 texts": wish(structured_output=choice),
        "structured_output has 1048581 bytes; the limit is 1048576": wish(structured_output=regex),
    }
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        for message, request in refusals.items():
            assert message in await refusal_of(stack.stub.Generate(request))


async def test_a_million_tokens_are_made_text_of_and_back():
    text = "a" * 2**20
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
            stub = FrontendServiceStub(channel)
            tokenized = await stub.Tokenize(pb.TokenizeRequest(text=text))
            assert len(tokenized.tokens) == len(tokenized.token_ids)
            ids = tokenized.token_ids[: 2**20]
            detokenized = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert text.startswith(detokenized.text)
    assert len(detokenized.text) > 2**18
