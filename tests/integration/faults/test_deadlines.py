"""A client's time limit passes in the queue, in prefill or in decode: it hears so, and in time.

The worker is frozen meanwhile, so the request is where the test wants it when its time is over.
"""

import asyncio

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.held import assert_all_is_given_back, frozen, held_by, worker_of
from tests.support.processes import Stack, stack

TIMEOUT_S = 1.0
PROMPT = [5, 6, 7, 8]


def request(num_prompt_tokens: int) -> pb.GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[3 + i % 500 for i in range(num_prompt_tokens)]),
        options=pb.GenerationOptions(sampling=sampling),
    )


@pytest.fixture(scope="module")
def services():
    with stack(engine={"max_num_seqs": 2, "max_num_batched_tokens": 16}) as running:
        yield running


@pytest.fixture
async def front(services):
    async with grpc.aio.insecure_channel(services.frontend.address) as channel:
        yield FrontendServiceStub(channel)


@pytest.fixture
async def engine(services):
    async with engine_stub(services.engine.address) as stub:
        yield stub


async def read_all(call) -> None:
    async with asyncio.timeout(30 * TIMEOUT_S):
        while await call.read() is not grpc.aio.EOF:
            pass


async def assert_expires(call) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def until_stats(engine, condition) -> None:
    async with asyncio.timeout(30):
        while not condition(await get_stats(engine)):  # noqa: ASYNC110  nothing to wait for
            await asyncio.sleep(0.01)


async def assert_frees(services: Stack, engine, *, num_others: int) -> None:
    """The worker is still frozen: what is free is free without another step."""
    await until_stats(engine, lambda s: s.num_running + s.num_waiting == num_others)


async def test_that_passes_in_the_queue_ends_the_request_and_no_other(services, front, engine):
    baseline = await held_by(services.engine)
    expected = await generate(engine, PROMPT, max_tokens=200, ignore_eos=True)
    others = [begin(engine, PROMPT, max_tokens=200, ignore_eos=True) for _ in range(2)]
    heads = [list((await other.read()).token_ids) for other in others]
    with frozen(worker_of(services.engine)):
        call = front.Generate(request(20), timeout=TIMEOUT_S)
        await until_stats(engine, lambda stats: stats.num_waiting == 1)
        await assert_expires(call)
        await assert_frees(services, engine, num_others=2)
    for head, other in zip(heads, others, strict=True):
        while (response := await other.read()) is not grpc.aio.EOF:
            head += response.token_ids
        assert head == expected.token_ids
    await assert_all_is_given_back(services.engine, baseline)


async def test_that_passes_in_prefill_ends_the_request(services, front, engine):
    baseline = await held_by(services.engine)
    with frozen(worker_of(services.engine)):
        call = front.Generate(request(900), timeout=TIMEOUT_S)
        await until_stats(engine, lambda stats: stats.num_running == 1)
        await assert_expires(call)
        await assert_frees(services, engine, num_others=0)
    await assert_all_is_given_back(services.engine, baseline)


async def test_that_passes_in_decode_ends_the_request(services, front, engine):
    baseline = await held_by(services.engine)
    call = front.Generate(request(5), timeout=3 * TIMEOUT_S)
    await call.read()
    with frozen(worker_of(services.engine)):
        await assert_expires(call)
        await assert_frees(services, engine, num_others=0)
    await assert_all_is_given_back(services.engine, baseline)
