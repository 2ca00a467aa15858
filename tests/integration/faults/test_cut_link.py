"""An engine and its node in network namespaces of their own, over a slow link that is cut."""

import asyncio
import secrets

import psutil
import pytest

from tests.integration.faults.test_lost_rank import PROMPTS, RECOVERY_LIMIT_S, run, tokens_of_all
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import children
from tests.support.nodes import NodeProcess
from tests.support.processes import start_engine
from tests.support.slow_link import obstacle, slow_link
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=f"no second host here: {obstacle()}")
DELAY_S = 0.002
SILENCE_TIMEOUT_S = 6


@pytest.fixture(scope="module")
def expected():
    with start_engine(device="cpu") as engine:
        return asyncio.run(tokens_of_all(engine))


async def test_the_tokens_go_on_after_the_link_to_a_node_was_cut(expected, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex())
    with slow_link(DELAY_S) as link:
        engine = start_engine(
            host=link.address,
            device="cpu",
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            num_nodes=2,
            node_interface=link.interface,
            node_secret_file=secret,
            node_silence_timeout_s=SILENCE_TIMEOUT_S,
            worker_patience_s=RECOVERY_LIMIT_S,
            kv_cache_memory_mb=64,
        )
        node = NodeProcess(
            engine.address,
            prefix=link.prefix,
            interface=link.other_interface,
            secret_file=secret,
        )
        with node, engine:
            await assert_tokens_go_on(engine, node, link, expected)


async def assert_tokens_go_on(engine, node, link, expected):
    async with engine_stub(engine.address) as stub, asyncio.timeout(RECOVERY_LIMIT_S):
        assert_meets_on(link.address, engine)
        before = await get_stats(stub)
        seen = [[] for _ in PROMPTS]
        running = [
            asyncio.create_task(run(stub, prompt, each))
            for prompt, each in zip(PROMPTS, seen, strict=True)
        ]
        await until(lambda: len(seen[0]) >= 10)
        lost = node.ranks
        link.is_cut = True
        # Both sides end their ranks; neither knows of the other.
        await until(lambda: not any(map(psutil.Process.is_running, lost)))
        await until(lambda: "was lost: nothing came from it" in engine.log)
        link.is_cut = False
        assert await asyncio.gather(*running) == expected
        after = await get_stats(stub)
    assert after.num_worker_restarts > before.num_worker_restarts
    assert f"node 1 ({link.other_address}) was lost: nothing came from it" in engine.log
    assert "it does not answer" in node.log


def assert_meets_on(address, engine):
    """Checks that ranks listen on no other address than that of the link."""
    listening = {
        each.laddr.ip
        for rank in children(engine)
        for each in rank.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening == {address}
