"""Sixty seconds of clients that behave badly: nothing hangs, nothing leaks."""

import asyncio
import os
import random
import time
from dataclasses import dataclass

import grpc
import psutil
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import GetStatsResponse
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from tests.support.engine_client import engine_stub, get_stats
from tests.support.processes import ServiceProcess, start_engine, start_frontend
from tests.support.varied_prompts import varied_prompts

SOAK_S = float(os.environ.get("OCTAVO_SOAK_S", "60"))
WARM_UP_S = min(5.0, SOAK_S)
SETTLE_S = 30.0
STREAM_TIMEOUT_S = 120.0
"""No stream takes nearly this long, however slow the machine; one that does hangs."""
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
                    end = await asyncio.wait_for(reading, STREAM_TIMEOUT_S)
                    ends[end] = ends.get(end, 0) + 1
                    break
                end = await asyncio.wait_for(_consume(call, rng, fate), STREAM_TIMEOUT_S)
                ends[end] = ends.get(end, 0) + 1


async def _soak(address: str, *, seed: int, duration_s: float) -> dict[str, int]:
    """Runs all clients for a while, to the end of their last requests; returns how often what."""
    ends: dict[str, int] = {}
    end_s = time.monotonic() + duration_s
    await asyncio.gather(*(_client(address, seed + i, end_s, ends) for i in range(NUM_CLIENTS)))
    return ends


@dataclass(frozen=True)
class Held:
    """What the services hold while nothing is asked of them."""

    num_live: int
    num_used_blocks: int
    num_sessions: int
    num_tasks: int
    """Of the engine service."""
    num_fds: dict[str, int]
    """By process."""
    rss_mb: dict[str, float]
    """By process; the allocator's business as much as ours, so it is shown and not judged."""

    def exceeds(self, other: "Held") -> bool:
        """Whether more is held of anything that is to be given back."""
        return (
            (self.num_live, self.num_used_blocks) != (0, 0)
            or self.num_sessions > other.num_sessions
            or self.num_tasks > other.num_tasks
            or any(num > other.num_fds[name] for name, num in self.num_fds.items())
        )


class Services:
    """An engine, its worker and a frontend, looked at from outside."""

    def __init__(self, engine: ServiceProcess, frontend: ServiceProcess) -> None:
        self._engine = engine
        service = psutil.Process(engine.pid)
        (worker,) = service.children()
        front = psutil.Process(frontend.pid)
        self._processes = {"engine": service, "worker": worker, "frontend": front}

    async def stats(self) -> GetStatsResponse:
        """Returns the engine's counters, asked for over a connection of its own."""
        async with engine_stub(self._engine.address) as stub:
            return await get_stats(stub)

    async def held(self) -> Held:
        """Returns what is held now."""
        stats = await self.stats()
        return Held(
            num_live=stats.num_running + stats.num_waiting,
            num_used_blocks=stats.num_blocks - 1 - stats.num_free_blocks,
            num_sessions=stats.num_sessions,
            num_tasks=stats.num_tasks,
            num_fds={name: process.num_fds() for name, process in self._processes.items()},
            rss_mb={
                name: round(process.memory_info().rss / 2**20, 1)
                for name, process in self._processes.items()
            },
        )

    async def settled(self, baseline: Held | None = None) -> Held:
        """Returns what is held once all is given back, or after SETTLE_S."""
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:
            held = await self.held()
            if not held.exceeds(baseline or held):
                break
            await asyncio.sleep(0.1)
        return held


@pytest.mark.slow
@pytest.mark.timeout(2 * SOAK_S + 300)
async def test_every_stream_ends_and_everything_is_given_back():
    with (
        start_engine(num_kv_blocks=300, max_num_seqs=48) as engine,
        start_frontend(engine.address) as frontend,
    ):
        services = Services(engine, frontend)
        # Thread pools and the like grow to the load once and stay; what counts is what comes after.
        await _soak(frontend.address, seed=1000, duration_s=WARM_UP_S)
        before = await services.settled()
        ends = await _soak(frontend.address, seed=0, duration_s=SOAK_S)
        after = await services.settled(before)
        stats = await services.stats()

    _report(ends=ends, num_preemptions=stats.num_preemptions, before=before, after=after)
    assert not after.exceeds(before)
    assert stats.num_worker_restarts == 0
    assert sum(ends.values()) > NUM_CLIENTS
    assert {"CANCELLED", "DEADLINE_EXCEEDED", "FINISH_REASON_LENGTH"} <= set(ends)


def _report(**facts: object) -> None:
    """Shows what pytest prints when the test fails, or always with -s."""
    for name, value in facts.items():
        print(f"{name}: {value}")  # noqa: T201  for whoever reads the test's output
