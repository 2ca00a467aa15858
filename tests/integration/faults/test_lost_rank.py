"""Faults of one rank of two: killed, stopped, or out of memory alone, at a random moment.

The promise is that of one rank: no stream ends, and greedy output is what it is without the fault.
"""

import asyncio
import os
import random
import resource
import signal
from pathlib import Path

import psutil
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import GenerateRequest
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import assert_all_is_given_back, children, held_by
from tests.support.processes import start_engine
from tests.support.waiting import until

PROMPTS = [[5, 6, 7, 8], [100, 101, 102], [9]]
NUM_TOKENS = 150
STEP_TIMEOUT_S = 10.0
RECOVERY_LIMIT_S = 150.0
LONG = [[3 + (number + i) % 500 for i in range(1800)] for number in range(8)]
SPARE_BYTES = 8 * 2**20
"""Less than a step of the long prompts takes."""


@pytest.fixture(scope="module")
def engine():
    with start_engine(
        tensor_parallel_size=2,
        device="cpu",
        step_timeout_s=STEP_TIMEOUT_S,
        kv_cache_memory_mb=64,
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
    ) as process:
        yield process


@pytest.fixture(scope="module")
def expected(engine):
    return asyncio.run(tokens_of_all(engine))


async def tokens_of_all(engine):
    async with engine_stub(engine.address) as stub:
        return await asyncio.gather(*(run(stub, prompt, []) for prompt in PROMPTS))


async def run(stub, prompt, seen):
    """Returns a request's tokens, which `seen` gets as they come."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
    async for response in stub.Generate(request):
        seen += response.token_ids
    return seen


async def pids_of(stub):
    """Returns the process id of each rank."""
    return [rank.pid for rank in (await get_stats(stub)).ranks]


async def tokens_despite(engine, harm):
    """Runs all prompts and does harm to the ranks at a random moment; returns the tokens."""
    baseline = await held_by(engine)
    async with engine_stub(engine.address) as stub, asyncio.timeout(RECOVERY_LIMIT_S):
        before = await get_stats(stub)
        pids = [rank.pid for rank in before.ranks]
        seen: list[list[int]] = [[] for _ in PROMPTS]
        running = [
            asyncio.create_task(run(stub, prompt, each))
            for prompt, each in zip(PROMPTS, seen, strict=True)
        ]
        moment = random.randrange(1, NUM_TOKENS // 2)
        await until(lambda: len(seen[0]) >= moment)
        harm(pids)
        tokens = await asyncio.gather(*running)
        after = await get_stats(stub)
        assert after.num_worker_restarts == before.num_worker_restarts + 1, f"moment {moment}"
        assert not set(pids).intersection(rank.pid for rank in after.ranks)
        assert not any(map(psutil.pid_exists, pids))
    await assert_all_is_given_back(engine, baseline)
    return tokens


def shared_memory():
    """Segments, without the semaphores that other programs keep for a moment."""
    return {each for each in Path("/dev/shm").iterdir() if not each.name.startswith("sem.")}


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSEGV)],
)
async def test_the_tokens_go_on_after_a_rank_is_lost(engine, expected, rank, number):
    shared, num_fds = shared_memory(), psutil.Process(engine.pid).num_fds()
    tokens = await tokens_despite(engine, lambda pids: os.kill(pids[rank], number))
    assert tokens == expected
    assert shared_memory() <= shared
    assert len(children(engine)) == 2
    await until(lambda: psutil.Process(engine.pid).num_fds() <= num_fds)


async def test_the_tokens_go_on_after_a_rank_alone_runs_out_of_memory(engine, expected):
    baseline = await held_by(engine)
    async with engine_stub(engine.address) as stub, asyncio.timeout(RECOVERY_LIMIT_S):
        before = await get_stats(stub)
        pid = before.ranks[1].pid
        limit = psutil.Process(pid).memory_info().vms + SPARE_BYTES
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        tokens = await asyncio.gather(*(run(stub, prompt, []) for prompt in LONG))
        after = await get_stats(stub)
        assert {len(each) for each in tokens} == {NUM_TOKENS}
        assert after.num_worker_restarts > before.num_worker_restarts
        assert await run(stub, PROMPTS[0], []) == expected[0]
    await assert_all_is_given_back(engine, baseline)


def test_the_end_of_the_engine_is_the_end_of_all_ranks():
    with start_engine(tensor_parallel_size=2, device="cpu") as engine:
        ranks = children(engine)
        ports = {
            each.laddr.port
            for rank in ranks
            for each in rank.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
        engine.kill()
        psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks)
    listening = {
        each.laddr.port
        for each in psutil.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert not ports & listening
