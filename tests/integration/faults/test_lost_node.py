"""An engine of two hosts, which are processes here: its tokens, and the loss of the other host.

The promise is that of one rank: no stream ends, and greedy output is what it is without the fault.
"""

import asyncio
import secrets
import signal

import psutil
import pytest

from tests.integration.faults.test_lost_rank import (
    PROMPTS,
    RECOVERY_LIMIT_S,
    STEP_TIMEOUT_S,
    run,
    tokens_of_all,
)
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import children
from tests.support.nodes import NodeProcess
from tests.support.processes import start_engine
from tests.support.waiting import until


@pytest.fixture(scope="module")
def expected():
    with start_engine(device="cpu") as engine:
        return asyncio.run(tokens_of_all(engine))


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex())
    return path


@pytest.fixture(scope="module")
def hosts(secret):
    """A running engine and its node."""
    engine = start_engine(
        device="cpu",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        num_nodes=2,
        node_secret_file=secret,
        step_timeout_s=STEP_TIMEOUT_S,
        node_silence_timeout_s=60,
        kv_cache_memory_mb=64,
    )
    with NodeProcess(engine.address, secret_file=secret) as node, engine:
        yield engine, node


async def test_ranks_on_two_hosts_give_the_tokens_of_one_rank(hosts, expected):
    engine, node = hosts
    assert await tokens_of_all(engine) == expected
    async with engine_stub(engine.address) as stub:
        pids = [rank.pid for rank in (await get_stats(stub)).ranks]
    assert {each.pid for each in node.ranks} >= set(pids[2:])
    assert {each.pid for each in children(engine)} >= set(pids[:2])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_tokens_go_on_after_a_node_is_lost_and_comes_back(hosts, expected, number):
    engine, node = hosts
    async with engine_stub(engine.address) as stub, asyncio.timeout(RECOVERY_LIMIT_S):
        before = await get_stats(stub)
        seen = [[] for _ in PROMPTS]
        running = [
            asyncio.create_task(run(stub, prompt, each))
            for prompt, each in zip(PROMPTS, seen, strict=True)
        ]
        await until(lambda: len(seen[0]) >= 10)
        lost = node.ranks
        if number == signal.SIGKILL:
            node.kill()
            node.wait()
            await until(lambda: not any(map(psutil.Process.is_running, lost)))
            node.start()
        else:  # a frozen rank: the step times out, and the node ends its ranks and joins again
            lost[0].send_signal(number)
        assert await asyncio.gather(*running) == expected
        after = await get_stats(stub)
    assert after.num_worker_restarts == before.num_worker_restarts + 1
    assert not set(lost) & set(node.ranks)
    await until(lambda: not any(map(psutil.Process.is_running, lost)))
    assert len(children(engine)) == 2


def test_the_end_of_the_engine_ends_the_ranks_of_its_nodes(hosts):
    engine, node = hosts
    ranks = node.ranks + children(engine)
    ports = {
        each.laddr.port
        for rank in ranks
        for each in rank.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    engine.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert psutil.pid_exists(node.pid)
    listening = {
        each.laddr.port
        for each in psutil.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert not ports & listening
