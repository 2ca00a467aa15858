"""The worker's memory ends in the middle of a step: the kernel refuses it, as a limit says."""

import asyncio
import resource

import psutil
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import GenerateRequest
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import assert_all_is_given_back, held_by, worker_of
from tests.support.pace import frozen, until_live
from tests.support.processes import start_engine

SHORT = [5, 6, 7, 8]
LONG = [[3 + (number + i) % 500 for i in range(1800)] for number in range(8)]
MAX_STEP = 16384
"""Query tokens; the long prompts together are one step."""
SPARE_MB = 8
"""Less than their step takes, and more than that of one of them."""


def allow(worker: psutil.Process, num_mb: int) -> None:
    """Lets the worker have no more than so much memory beyond what it has."""
    limit = worker.memory_info().vms + num_mb * 2**20
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def allow_all(worker: psutil.Process) -> None:
    resource.prlimit(
        worker.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )


@pytest.fixture(scope="module")
def engine():
    with start_engine(max_num_batched_tokens=MAX_STEP, kv_cache_memory_mb=64) as process:
        yield process


async def run_all(engine, stub, cache_salt: str) -> list[list[int]]:
    """Runs all prompts, the long ones in one step if memory suffices; returns their tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def run(prompt):
        request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, cache_salt=cache_salt)
        return [token async for response in stub.Generate(request) for token in response.token_ids]

    async with asyncio.timeout(120):
        # The short one takes the steps that may be in flight, and the long ones wait together.
        with frozen(worker_of(engine)):
            running = [asyncio.create_task(run(SHORT))]
            while not (await get_stats(stub)).num_running:  # noqa: ASYNC110  nothing to wait for
                await asyncio.sleep(0.01)
            running += [asyncio.create_task(run(prompt)) for prompt in LONG]
            await until_live(engine, len(running))
        return await asyncio.gather(*running)


async def test_the_step_is_made_smaller_and_all_requests_get_the_same_tokens(engine):
    baseline = await held_by(engine)
    worker = worker_of(engine)
    async with engine_stub(engine.address) as stub:
        allow(worker, SPARE_MB)
        try:
            tokens = await run_all(engine, stub, "scarce")
        finally:
            allow_all(worker)
        stats = await get_stats(stub)
        assert stats.num_failed_steps > 0
        assert stats.num_batched_tokens_limit < MAX_STEP
        assert stats.num_worker_restarts == 0
        assert worker.is_running()
        assert tokens == await run_all(engine, stub, "plenty")
        assert [len(each) for each in tokens] == [20] * 9
    await assert_all_is_given_back(engine, baseline)
