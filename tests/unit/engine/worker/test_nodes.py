"""Ranks on a second host, which is a process here: tokens of one rank, and starts that fail."""

import asyncio
import contextlib

import pytest

from services.engine.worker.remote_ranks import JoinedNodes
from tests.support.nodes import NodeProcess, head_server
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core, start_error
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
NUM_TOKENS = 8
TENSOR = {"tensor_parallel_size": 4, "num_nodes": 2}
GRAPHS = {
    "cudagraph_mode": "full_decode_only",
    "cudagraph_capture_sizes": [4],
    "capture_while_serving": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, "qwen3_moe")


@contextlib.asynccontextmanager
async def joined(config, **flags):
    """Has a node that joins the engine of a configuration."""
    nodes = JoinedNodes(config.parallel.num_nodes)
    async with head_server(nodes, config.parallel) as head:
        with NodeProcess(head, **flags):
            yield nodes


async def test_one_layer_shared_by_two_hosts_gives_the_tokens_of_transformers(checkpoint):
    folder, reference = checkpoint
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    config = ranks_config(folder, max_num_batched_tokens=8, **TENSOR, **GRAPHS)
    async with joined(config) as nodes, ranks_core(config, nodes) as ranks:
        assert await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS)) == expected
        assert len(ranks.core.worker.ranks) == 4


async def test_a_fused_all_reduce_over_two_hosts_is_refused(checkpoint):
    config = ranks_config(checkpoint[0], all_reduce="fused", tensor_parallel_size=2, num_nodes=2)
    async with joined(config) as nodes:
        error = await start_error(config, nodes)
    assert "--all-reduce fused is impossible: " in error
    assert "the ranks are on several hosts" in error
    assert "Traceback" not in error


async def test_an_interface_that_does_not_exist_is_named_before_hosts_join(checkpoint):
    config = ranks_config(
        checkpoint[0], tensor_parallel_size=2, num_nodes=2, node_interface="nothing0"
    )
    error = await start_error(config, JoinedNodes(2))  # no other host has joined
    assert error == "the network interface nothing0 has no IPv4 address: No such device"


async def test_a_node_that_is_lost_while_ranks_start_is_named(checkpoint):
    config = ranks_config(checkpoint[0], tensor_parallel_size=2, num_nodes=2)
    nodes = JoinedNodes(2)
    link = nodes.admit(1, "192.0.2.7")
    starting = asyncio.create_task(start_error(config, nodes))
    order = await link.next_order(60)
    assert order.start.rank == 1
    link.lose("it left")
    assert await starting == "node 1 (192.0.2.7) was lost: it left"
