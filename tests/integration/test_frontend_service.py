"""The frontend as a process, in front of the real engine with the embedded model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.held import worker_of
from tests.support.pace import frozen, stopped, together
from tests.support.processes import ServiceProcess, Stack, start_engine, start_frontend
from tests.support.steered_engine import stop_after

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
ABORTED = FinishReason.FINISH_REASON_ABORTED


@pytest.fixture
async def stub(services: Stack) -> AsyncIterator[FrontendServiceStub]:
    async with client_of(services.frontend) as connected:
        yield connected


@contextlib.asynccontextmanager
async def client_of(frontend: ServiceProcess) -> AsyncIterator[FrontendServiceStub]:
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        yield FrontendServiceStub(channel)


def chat(text: str, **sampling: object) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=text)], options=options(**sampling)
    )


def options(*, stop: tuple[str, ...] = (), **sampling: object) -> pb.GenerationOptions:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 64, **sampling})
    return pb.GenerationOptions(sampling=params, stop=stop)


async def collect(call) -> tuple[str, pb.Output]:
    outputs = [response.output async for response in call]
    return "".join(output.text for output in outputs), outputs[-1]


async def test_a_sum_is_answered(stub):
    text, last = await collect(stub.Chat(chat("What is 3 + 4?")))
    assert "7" in text
    assert "<|im_end|>" not in text
    assert last.finish_reason == STOP
    assert last.HasField("stop_token_id")
    assert last.usage.prompt_tokens > 0
    assert last.usage.output_tokens > 1


async def test_text_is_tokenized_and_back(stub):
    text = "Octavo \N{SNOWMAN} says: 1 + 2 = 3.\n"
    tokenized = await stub.Tokenize(pb.TokenizeRequest(text=text))
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert back.text == text


async def test_a_prompt_as_text_and_as_tokens_is_continued_alike(stub):
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content="What is 5 + 5?")])
    tokenized = await stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
    by_chat, _ = await collect(stub.Chat(chat("What is 5 + 5?")))
    by_tokens, _ = await collect(
        stub.Generate(
            pb.GenerateRequest(tokens=pb.TokenIds(ids=tokenized.token_ids), options=options())
        )
    )
    assert by_tokens == by_chat


async def test_a_stop_string_cuts_the_text_that_comes_without_it(stub):
    whole, _ = await collect(stub.Chat(chat("What is 3 + 4?")))
    request = chat("What is 3 + 4?")
    request.options.stop.append(whole[3:6])
    text, last = await collect(stub.Chat(request))
    assert text == whole[: whole.index(whole[3:6])]
    assert (last.finish_reason, last.stop_string) == (STOP, whole[3:6])


async def test_the_same_seed_gives_the_same_text_beside_others(stub):
    request = chat("Tell me a story.", temperature=1.0, seed=7, max_tokens=24)
    alone, _ = await collect(stub.Chat(request))
    others = [stub.Chat(chat(f"What is {n} + 2?")) for n in range(8)]
    (beside, _), *_ = await asyncio.gather(
        collect(stub.Chat(request)), *[collect(other) for other in others]
    )
    assert beside == alone


async def test_log_probabilities_are_reported_on_wish(stub):
    _, last = await collect(stub.Chat(chat("What is 3 + 4?", logprobs=2, max_tokens=1)))
    [position] = last.logprobs
    assert position.chosen.token_id == last.token_ids[0] == position.top[0].token_id
    assert position.top[1].logprob <= position.top[0].logprob <= 0


async def test_a_session_interleaves_cancels_and_takes_parts(services, stub, stop_file):
    call = stub.Session()
    # The worker stops long after the others have ended, so this is there until it is cancelled.
    stop_after(stop_file, 1000)
    endless = options(max_tokens=1500, ignore_eos=True)
    long = pb.GenerateRequest(text="x", options=endless)
    async with together(services.engine, 3):
        await call.write(pb.SessionRequest(handle=1, generate=long))
        await call.write(pb.SessionRequest(handle=2, chat=chat("What is 3 + 4?")))
        first = pb.PromptPart(text="Once upon", options=options(max_tokens=5))
        await call.write(pb.SessionRequest(handle=3, prompt_part=first))
        await call.write(
            pb.SessionRequest(handle=3, prompt_part=pb.PromptPart(text=" a time", last=True))
        )
        await call.write(pb.SessionRequest(handle=4, generate=pb.GenerateRequest(text="")))
    ended: dict[int, object] = {}
    while not {2, 3, 4} <= ended.keys():
        response = await call.read()
        if response.HasField("failure"):
            ended[response.handle] = response.failure.code
        elif response.output.finish_reason:
            ended[response.handle] = response.output.finish_reason
    assert 1 not in ended
    async with stopped(services.engine):
        await call.write(pb.SessionRequest(handle=1, cancel=pb.Cancel()))
        while 1 not in ended:
            response = await call.read()
            if response.output.finish_reason:
                ended[response.handle] = response.output.finish_reason
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert ended == {1: ABORTED, 2: STOP, 3: LENGTH, 4: invalid}
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    "sampling", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"logprobs": 21}]
)
async def test_sampling_out_of_range_is_refused_in_the_engines_words(stub, sampling):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Chat(chat("hi", **sampling)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(sampling)) in caught.value.details()


async def test_a_prompt_over_the_context_is_refused(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Chat(chat("word " * 5000)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_deadline_ends_a_long_answer(services, stub):
    request = pb.GenerateRequest(text="x", options=options(max_tokens=2000, ignore_eos=True))
    with frozen(worker_of(services.engine)), pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request, timeout=0.2))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_frontend_that_starts_first_waits_for_its_engine():
    engine = start_engine()
    frontend = start_frontend(engine.address)
    try:
        frontend.start()
        await asyncio.to_thread(frontend.wait_ready, "liveness")
        assert not await asyncio.to_thread(frontend.is_serving)
        async with engine:
            await asyncio.to_thread(frontend.wait_ready)
    finally:
        frontend.kill()


def test_no_text_is_logged(services):
    assert "3 + 4" not in services.frontend.log
    assert "request_finished" in services.frontend.log
