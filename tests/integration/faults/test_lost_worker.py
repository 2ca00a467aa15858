"""SIGKILL, SIGSTOP, SIGTERM and a crash of the worker, through both real services.

The promise: no stream ends, and greedy output is what it is without the fault.
"""

import asyncio
import contextlib
import random
import signal
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import assert_all_is_given_back, held_by, worker_of
from tests.support.pace import frozen, stopped, until_live
from tests.support.processes import Stack, stack
from tests.support.steered_engine import MODULE, stop_after

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
RECOVERY_LIMIT_S = 150.0
"""A worker starts in a few seconds; this is for a machine that does much else."""
HUNG = "no step finished for"
TEXTS = ["Once upon a time", "What is 3 + 4?", "The sea"]


def request(text: str, *, max_tokens: int = 400) -> pb.GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(sampling=sampling))


async def read_all(stream) -> tuple[list[int], int]:
    outputs = [response.output async for response in stream]
    token_ids = [token for output in outputs for token in output.token_ids]
    return token_ids, outputs[-1].finish_reason


async def uninterrupted(stub: FrontendServiceStub) -> list[tuple[list[int], int]]:
    return await asyncio.gather(*(read_all(stub.Generate(request(text))) for text in TEXTS))


async def interrupted(
    services: Stack,
    stub: FrontendServiceStub,
    number: signal.Signals,
    stop_file: Path,
    *,
    delay_s: float = 0,
):
    """Sends the signal to the worker while every stream is under way; returns how they end."""
    stop_after(stop_file, 20)
    with frozen(worker_of(services.engine)):
        calls = [aiter(stub.Generate(request(text))) for text in TEXTS]
        await until_live(services.engine, len(TEXTS))
    async with stopped(services.engine) as worker:
        heads = [await anext(call) for call in calls]
        if delay_s:
            worker.resume()
            await asyncio.sleep(delay_s)
        worker.send_signal(number)
        if number != signal.SIGSTOP:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        async with asyncio.timeout(RECOVERY_LIMIT_S):
            tails = await asyncio.gather(*map(read_all, calls))
    # It has noticed the loss, in the stream that brought the tails, but maybe not the return.
    await asyncio.to_thread(services.frontend.wait_ready)
    return [
        ([*head.output.token_ids, *tokens], reason)
        for head, (tokens, reason) in zip(heads, tails, strict=True)
    ]


@pytest.fixture(scope="module")
def services(stop_file):
    # A busy machine may hold up a worker that is well for most of the time that a step may take.
    flags = {"step_timeout_s": 10, "worker_patience_s": 300}
    with stack(engine={"module": MODULE, "stop_file": stop_file, **flags}) as running:
        yield running


@pytest.fixture(scope="module")
def expected(services):
    async def run():
        async with grpc.aio.insecure_channel(services.frontend.address) as channel:
            return await uninterrupted(FrontendServiceStub(channel))

    return asyncio.run(run())


@pytest.fixture
async def stub(services):
    async with grpc.aio.insecure_channel(services.frontend.address) as channel:
        yield FrontendServiceStub(channel)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV])
async def test_of_the_worker_interrupts_streams_and_ends_none(
    services, stub, stop_file, expected, number
):
    baseline = await held_by(services.engine)
    async with engine_stub(services.engine.address) as engine:
        before = await get_stats(engine)
        async with grpc.aio.insecure_channel(services.engine.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            assert await interrupted(services, stub, number, stop_file) == expected
            assert (await watch.read()).status == NOT_SERVING
            assert (await watch.read()).status == SERVING
            watch.cancel()
        after = await get_stats(engine)
    assert after.num_worker_restarts - before.num_worker_restarts == 1
    assert after.finished["failed"] == before.finished["failed"]
    await assert_all_is_given_back(services.engine, baseline)


@pytest.mark.faults
@pytest.mark.timeout(3600)
async def test_of_the_worker_at_any_moment_changes_no_token(services, stub, stop_file, expected):
    delays = random.Random(3)
    async with engine_stub(services.engine.address) as engine:
        for _ in range(20):
            number = delays.choice([signal.SIGKILL, signal.SIGSEGV])
            delay_s = delays.uniform(0, 0.5)
            before = (await get_stats(engine)).num_worker_restarts
            assert await interrupted(services, stub, number, stop_file, delay_s=delay_s) == expected
            async with asyncio.timeout(RECOVERY_LIMIT_S):
                while (await get_stats(engine)).num_worker_restarts == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(services.engine.wait_ready)


async def test_a_worker_that_hangs_leaves_its_stacks_in_the_log(services, stub, stop_file):
    if HUNG not in services.engine.log:  # no test before this one has let it hang
        await interrupted(services, stub, signal.SIGSTOP, stop_file)
    log = services.engine.log
    hung = log.index(HUNG)
    assert "services/engine/worker/process.py" in log[hung:]
    assert "services/engine/core/step_loop.py" in log[hung:]


async def test_a_request_without_a_worker_past_the_time_limit_ends_with_unavailable(stop_file):
    flags = {"module": MODULE, "stop_file": stop_file, "worker_patience_s": 0}
    async with stack(engine=flags) as services:
        baseline = await held_by(services.engine)
        async with grpc.aio.insecure_channel(services.frontend.address) as channel:
            stub = FrontendServiceStub(channel)
            stop_after(stop_file, 20)
            call = aiter(stub.Generate(request(TEXTS[0], max_tokens=1500)))
            await anext(call)
            async with stopped(services.engine) as worker:
                stop_after(stop_file, 0)
                worker.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            async with stopped(services.engine), asyncio.timeout(60):
                while await asyncio.to_thread(services.frontend.is_serving):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(services.engine.wait_ready)
            await asyncio.to_thread(services.frontend.wait_ready)
            _, reason = await read_all(stub.Generate(request(TEXTS[0])))
            assert reason == FinishReason.FINISH_REASON_LENGTH
        await assert_all_is_given_back(services.engine, baseline)
