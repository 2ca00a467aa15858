"""A client's time limit passes in the queue, in prefill or in decode: the call ends so, and in
time.

The worker is frozen meanwhile, so the request is where the test wants it when its time is over.
"""

import asyncio

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.held import assert_all_is_given_back, held_by, worker_of
from tests.support.pace import frozen, has_stopped, stopped, until_live
from tests.support.processes import Stack, stack
from tests.support.steered_engine import MODULE, stop_after

TIMEOUT_S = 1.0
PROMPT = [5, 6, 7, 8]


def request(num_prompt_tokens: int) -> pb.GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[3 + i % 500 for i in range(num_prompt_tokens)]),
        options=pb.GenerationOptions(sampling=sampling),
    )


@pytest.fixture(scope="module")
def services(stop_file):
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    with stack(engine={"module": MODULE, "stop_file": stop_file, **limits}) as running:
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
    async with asyncio.timeout(60):
        while await call.read() is not grpc.aio.EOF:
            pass


async def assert_expires(call) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def begin_until(front, num_prompt_tokens: int, has_come):
    """Returns a call whose request has come where the test wants it, however long that took."""
    timeout_s = TIMEOUT_S
    while True:
        call = front.Generate(request(num_prompt_tokens), timeout=timeout_s)
        while not call.done():
            if await has_come():
                return call
            await asyncio.sleep(0.01)
        timeout_s *= 2  # its time has passed on the way


async def assert_frees(services: Stack, *, num_others: int) -> None:
    """The worker is still frozen: what is free is free without another step."""
    await until_live(services.engine, num_others)


async def test_that_passes_in_the_queue_ends_the_request_and_no_other(
    services, front, engine, stop_file
):
    async def is_waiting() -> bool:
        return (await get_stats(engine)).num_waiting == 1

    baseline = await held_by(services.engine)
    expected = await generate(engine, PROMPT, max_tokens=200, ignore_eos=True)
    stop_after(stop_file, 5)
    with frozen(worker_of(services.engine)):
        others = [begin(engine, PROMPT, max_tokens=200, ignore_eos=True) for _ in range(2)]
        await until_live(services.engine, 2)
    heads = [list((await other.read()).token_ids) for other in others]
    async with stopped(services.engine):
        call = await begin_until(front, 20, is_waiting)
        await assert_expires(call)
        await assert_frees(services, num_others=2)
    for head, other in zip(heads, others, strict=True):
        while (response := await other.read()) is not grpc.aio.EOF:
            head += response.token_ids
        assert head == expected.token_ids
    await assert_all_is_given_back(services.engine, baseline)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens"), [(900, -800), (5, 5)], ids=["prefill", "decode"]
)
async def test_that_passes_while_it_runs_ends_the_request(
    services, front, stop_file, num_prompt_tokens, num_tokens
):
    async def has_come() -> bool:
        return has_stopped(services.engine)

    baseline = await held_by(services.engine)
    stop_after(stop_file, num_tokens)
    call = await begin_until(front, num_prompt_tokens, has_come)
    async with stopped(services.engine):
        await assert_expires(call)
        await assert_frees(services, num_others=0)
    await assert_all_is_given_back(services.engine, baseline)
