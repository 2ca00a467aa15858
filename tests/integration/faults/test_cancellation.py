"""Clients go away at every stage: the real engine frees what they held, without a step more.

The worker is frozen meanwhile, so that no step can finish: what is free then was freed at once.
"""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import Abort, FrontendHello, FrontendMessage, Submit
from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.held import worker_of
from tests.support.pace import frozen, stopped
from tests.support.processes import ServiceProcess, start_engine
from tests.support.steered_engine import MODULE, stop_after
from tests.support.waiting import until

LONG_PROMPT = [3 + i % 500 for i in range(600)]
SHORT_PROMPT = [5, 6, 7, 8]
ENDLESS = {"max_tokens": 1200, "ignore_eos": True}
MAX_STEPS_IN_FLIGHT = 2


@pytest.fixture(scope="module")
def engine(stop_file):
    flags = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "heartbeat_interval_ms": 50}
    with start_engine(module=MODULE, stop_file=stop_file, num_kv_blocks=200, **flags) as process:
        yield process


@pytest.fixture
async def stub(engine):
    async with engine_stub(engine.address) as connected:
        yield connected


async def stats_when(stub, condition):
    """Returns the engine's stats once they meet the condition."""
    async with asyncio.timeout(60):
        while not condition(stats := await get_stats(stub)):  # noqa: ASYNC110  nothing to wait for
            await asyncio.sleep(0.01)
    return stats


def is_idle(stats) -> bool:
    is_free = stats.num_free_blocks == stats.num_blocks - 1
    return is_free and stats.num_running == stats.num_waiting == 0


class CallClient:
    """A client with a call of its own, which it cancels."""

    def __init__(self, stub):
        self._stub = stub

    async def start(self, prompt):
        self._call = begin(self._stub, prompt, **ENDLESS)

    async def first_token(self):
        await self._call.read()

    async def leave(self):
        self._call.cancel()


class AbortingFrontend:
    """A frontend that aborts its request and stays."""

    def __init__(self, stub):
        self._call = stub.Session()

    async def start(self, prompt):
        await self._call.write(FrontendMessage(hello=FrontendHello(frontend_id="test")))
        submit = Submit(
            handle=1,
            request_id="victim",
            prompt_token_ids=np.array(prompt, "<u4").tobytes(),
            sampling=SamplingParams(**ENDLESS),
        )
        await self._call.write(FrontendMessage(submit=submit))

    async def first_token(self):
        while (await self._call.read()).WhichOneof("message") != "step":
            pass

    async def leave(self):
        await self._call.write(FrontendMessage(abort=Abort(handles=[1])))


class DyingFrontend(AbortingFrontend):
    """A frontend whose session stream dies."""

    async def leave(self):
        self._call.cancel()


@pytest.fixture(params=[CallClient, AbortingFrontend, DyingFrontend])
async def client(request, engine):
    """A client on a connection of its own, as it may take that with it."""
    async with engine_stub(engine.address) as connected:
        yield request.param(connected)


async def assert_frees_at_once(stub, client, num_steps):
    await client.leave()
    stats = await stats_when(stub, is_idle)
    assert stats.num_steps - num_steps <= MAX_STEPS_IN_FLIGHT


async def assert_serves(stub):
    reply = await generate(stub, SHORT_PROMPT, max_tokens=12, ignore_eos=True)
    assert len(reply.token_ids) == 12
    assert is_idle(await get_stats(stub))


async def test_a_client_that_leaves_during_decode_frees_its_blocks(engine, stub, client, stop_file):
    stop_after(stop_file, 5)
    await client.start(SHORT_PROMPT)
    await client.first_token()
    async with stopped(engine):
        stats = await get_stats(stub)
        assert stats.num_running == 1
        await assert_frees_at_once(stub, client, stats.num_steps)
    await assert_serves(stub)


async def test_a_client_that_leaves_during_prefill_frees_its_blocks(engine, stub, client):
    with frozen(worker_of(engine)):
        num_steps = (await get_stats(stub)).num_steps
        await client.start(LONG_PROMPT)
        stats = await stats_when(stub, lambda stats: stats.num_running == 1)
        assert stats.num_free_blocks < stats.num_blocks - 1
        await assert_frees_at_once(stub, client, num_steps)
    await assert_serves(stub)


async def test_a_client_that_leaves_the_queue_is_forgotten(engine, stub, client):
    with frozen(worker_of(engine)):
        holder = begin(stub, SHORT_PROMPT, **ENDLESS)
        await stats_when(stub, lambda stats: stats.num_running == 1)
        await client.start(LONG_PROMPT)
        await stats_when(stub, lambda stats: stats.num_waiting == 1)
        await client.leave()
        stats = await stats_when(stub, lambda stats: stats.num_waiting == 0)
        assert stats.num_running == 1
        holder.cancel()
        await stats_when(stub, is_idle)
    await assert_serves(stub)


@pytest.mark.usefixtures("services_are_started")
class TestKilledEngine:
    """SIGKILL leaves the engine no time to end its worker."""

    @asynccontextmanager
    async def killed(self, engine: ServiceProcess):
        """Yields the worker; kills the engine alone when the block ends, and waits for both."""
        worker = worker_of(engine)
        yield worker
        engine.signal(signal.SIGKILL)
        await asyncio.to_thread(engine.wait)
        await asyncio.to_thread(psutil.wait_procs, [worker], timeout=30)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE

    async def test_takes_a_busy_worker_with_it(self):
        async with (
            start_engine() as engine,
            engine_stub(engine.address) as stub,
            self.killed(engine),
        ):
            await begin(stub, SHORT_PROMPT, **ENDLESS).read()

    async def test_takes_a_frozen_worker_with_it(self):
        async with start_engine() as engine, self.killed(engine) as worker:
            os.kill(worker.pid, signal.SIGSTOP)

    async def test_takes_a_worker_that_still_starts_with_it(self):
        engine = start_engine()
        engine.start()
        try:
            await until(psutil.Process(engine.pid).children, timeout_s=60)
            async with self.killed(engine):
                pass
        finally:
            engine.kill()
