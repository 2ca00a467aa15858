"""Several outputs of one prompt, through a real frontend in front of a scripted engine."""

import grpc
import pytest

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import FINISH_REASON_STOP, SamplingParams
from protos.frontend.v1 import frontend_pb2
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until


def request(n, **options):
    return frontend_pb2.GenerateRequest(
        text="one two", options=frontend_pb2.GenerationOptions(n=n, **options)
    )


async def outputs_of(call):
    return [response.output async for response in call]


async def test_each_output_has_its_index_and_end_and_the_last_message_the_usage_of_all():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        outputs = await outputs_of(stack.stub.Generate(request(3)))
    for index in range(3):
        own = [output for output in outputs if output.index == index]
        assert "".join(output.text for output in own) == "hello world"
        assert [o.finish_reason for o in own if o.finish_reason] == [FINISH_REASON_STOP]
    assert [output.HasField("usage") for output in outputs] == [False] * (len(outputs) - 1) + [True]
    usage = outputs[-1].usage
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert (usage.prompt_tokens, usage.output_tokens) == (2, num_tokens)
    assert len({output.request_id for output in outputs}) == 1


async def test_seeds_follow_each_other_and_wrap_around():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        sampling = SamplingParams(seed=2**64 - 2, top_k=3)
        await outputs_of(stack.stub.Generate(request(3, sampling=sampling)))
        sent = [submit.sampling for submit in engine.submits]
    assert [sampling.seed for sampling in sent] == [2**64 - 2, 2**64 - 1, 0]
    assert all(sampling.top_k == 3 for sampling in sent)


async def test_without_a_seed_each_output_gets_one_of_its_own():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        await outputs_of(stack.stub.Generate(request(2)))
        assert len({submit.sampling.seed for submit in engine.submits}) == 2
        assert len({submit.request_id for submit in engine.submits}) == 2


async def test_a_stop_string_ends_each_output_by_itself():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        outputs = await outputs_of(stack.stub.Generate(request(2, stop=["wor"])))
    for index in range(2):
        own = [output for output in outputs if output.index == index]
        assert "".join(output.text for output in own) == "hello "
        assert own[-1].stop_string == "wor"


@pytest.mark.parametrize(
    ("n", "limit", "why"), [(0, 16, "must be 1 to 16"), (17, 16, "1 to 16"), (3, 2, "1 to 2")]
)
async def test_their_number_is_bounded(n, limit, why):
    async with FakeEngine() as engine, frontend_stack(engine, max_samples=limit) as stack:
        with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
            await outputs_of(stack.stub.Generate(request(n)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not engine.submits


async def test_a_refusal_of_one_is_the_refusal_of_all_and_leaves_none_running():
    failure = Failure(code=8, message="the queue is full")
    async with FakeEngine(rejection=failure) as engine, frontend_stack(engine) as stack:
        with pytest.raises(grpc.aio.AioRpcError, match="queue is full"):
            await outputs_of(stack.stub.Generate(request(4)))
        assert not engine.live


async def test_a_client_that_leaves_ends_all_of_them():
    endless = says("one two " * 100, eos=False)
    async with FakeEngine(script=endless, hold_at=9) as engine, frontend_stack(engine) as stack:
        call = stack.stub.Generate(request(3))
        await call.read()
        call.cancel()
        await until(lambda: len(engine.aborted) == 3)


async def test_an_engine_that_dies_ends_all_of_them_with_one_status():
    endless = says("one two " * 100, eos=False)
    async with FakeEngine(script=endless, hold_at=9) as engine, frontend_stack(engine) as stack:
        outputs = aiter(stack.stub.Generate(request(3)))
        await anext(outputs)
        await engine.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [output async for output in outputs]
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_session_frees_the_handle_when_the_last_output_has_ended():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        call = stack.stub.Session()
        await call.write(frontend_pb2.SessionRequest(handle=4, generate=request(2)))
        while not (response := await call.read()).output.HasField("usage"):
            assert response.handle == 4
        await call.write(frontend_pb2.SessionRequest(handle=4, generate=request(1)))
        await call.done_writing()
        while not (response := await call.read()).output.HasField("usage"):
            assert response.handle == 4
        assert await call.read() is grpc.aio.EOF
