"""Sixty seconds of clients that behave badly: nothing hangs, nothing leaks."""

import asyncio
import os
import random
import time

import grpc
import psutil
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from tests.support.processes import start_engine, start_frontend
from tests.support.varied_prompts import varied_prompts

SOAK_S = float(os.environ.get("OCTAVO_SOAK_S", "60"))
NUM_CLIENTS = 64
PROMPTS = varied_prompts(64, seed=7)
ALLOWED_CODES = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def _request(rng: random.Random) -> frontend_pb2.GenerateRequest:
    text, _ = rng.choice(PROMPTS)
    sampling = sampling_pb2.SamplingParams(
        temperature=rng.choice([0, 0.8, 1.5]),
        max_tokens=rng.choice([1, 8, 64, 200]),
        ignore_eos=True,
    )
    options = frontend_pb2.GenerationOptions(sampling=sampling, priority=rng.choice([0, 0, 1]))
    return frontend_pb2.GenerateRequest(options=options, text=text)


async def _consume(call, rng: random.Random, fate: str) -> str:
    """Reads a stream until its fate, and returns how it ended."""
    stop_after = rng.randint(0, 20)
    last = None
    try:
        async for response in call:
            last = response.output
            stop_after -= 1
            if fate == "cancel" and stop_after < 0:
                call.cancel()
    except asyncio.CancelledError:
        return "CANCELLED"
    except grpc.aio.AioRpcError as error:
        if error.code() not in ALLOWED_CODES:
            raise
        return error.code().name
    assert last is not None
    assert last.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED
    return sampling_pb2.FinishReason.Name(last.finish_reason)


async def _client(address: str, seed: int, end_s: float, ends: dict[str, int]) -> None:
    """One client: a request after the other, each with a fate; now and then the line is cut."""
    rng = random.Random(seed)
    while time.monotonic() < end_s:
        async with grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            for _ in range(rng.randint(1, 6)):
                fate = rng.choice(["finish", "finish", "cancel", "deadline", "disconnect"])
                timeout = rng.uniform(0.01, 1.0) if fate == "deadline" else None
                call = stub.Generate(_request(rng), timeout=timeout)
                if fate == "disconnect":
                    reading = asyncio.create_task(_consume(call, rng, fate))
                    await asyncio.sleep(rng.uniform(0, 0.5))
                    await channel.close()
                    end = await asyncio.wait_for(reading, 60)
                    ends[end] = ends.get(end, 0) + 1
                    break
                end = await asyncio.wait_for(_consume(call, rng, fate), 60)
                ends[end] = ends.get(end, 0) + 1


async def _stats(address: str) -> engine_pb2.GetStatsResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        return await engine_pb2_grpc.EngineServiceStub(channel).GetStats(
            engine_pb2.GetStatsRequest()
        )


async def _settled(address: str) -> engine_pb2.GetStatsResponse:
    """Waits until the engine holds nothing, at most ten seconds, and returns its stats."""
    for _ in range(100):
        stats = await _stats(address)
        if stats.num_running == stats.num_waiting == 0:
            break
        await asyncio.sleep(0.1)
    return stats


async def _num_fds(process: psutil.Process, at_most: int) -> int:
    """Descriptors of a process once those of closed connections are gone, or after ten seconds."""
    for _ in range(100):
        if process.num_fds() <= at_most:
            break
        await asyncio.sleep(0.1)
    return process.num_fds()


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 180)
async def test_every_stream_ends_and_everything_is_given_back():
    with (
        start_engine(num_kv_blocks=600, max_num_seqs=48) as engine,
        start_frontend(engine.address) as frontend,
    ):
        warm_up: dict[str, int] = {}
        await _client(frontend.address, 1, time.monotonic() + 2, warm_up)
        before = await _settled(engine.address)
        processes = [psutil.Process(engine.pid), psutil.Process(frontend.pid)]
        fds_before = [process.num_fds() for process in processes]

        ends: dict[str, int] = {}
        end_s = time.monotonic() + SOAK_S
        clients = [_client(frontend.address, 100 + i, end_s, ends) for i in range(NUM_CLIENTS)]
        await asyncio.gather(*clients)

        after = await _settled(engine.address)
        assert (after.num_running, after.num_waiting) == (0, 0)
        assert after.num_free_blocks == before.num_free_blocks == after.num_blocks - 1
        assert after.num_tasks == before.num_tasks
        fds_after = [
            await _num_fds(process, fds) for process, fds in zip(processes, fds_before, strict=True)
        ]
        assert fds_after <= fds_before
        assert sum(ends.values()) > NUM_CLIENTS
        assert {"CANCELLED", "DEADLINE_EXCEEDED", "FINISH_REASON_LENGTH"} <= set(ends)
