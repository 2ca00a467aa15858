"""Ranks with requests of their own, through both services: the tokens of transformers."""

import asyncio
import os
import re
import shutil
import signal

import grpc
import httpx
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import WatchStepsRequest
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.engine.batch import read_int32
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import engine_stub, get_stats
from tests.support.processes import free_port, stack
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import greedy_continuation
from tests.support.transformers_reference import TransformersReference
from tests.support.waiting import until

TEXTS = ("The cat sat", "One two three", "A")
NUM_TOKENS = 150
STEP_TIMEOUT_S = 10.0
METRICS_PORT = free_port()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def expected(folder):
    model = write_checkpoint(folder, "deepseek_v3", vocab_size=1024, max_position_embeddings=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    encode = TransformersReference(folder).encode
    prompts = [encode(text, is_chat=False) for text in TEXTS]
    return [greedy_continuation(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def services(folder, expected):
    flags = {
        "device": "cpu",
        "allow_watch_tokens": True,
        "data_parallel_size": 2,
        "cudagraph_mode": "full_and_piecewise",
        "cudagraph_capture_sizes": "[1,4]",
        "kv_cache_memory_mb": 16,
        "step_timeout_s": STEP_TIMEOUT_S,
        "metrics_port": METRICS_PORT,
    }
    with stack(engine={"model": folder, **flags}) as running:
        yield running


async def ask(address, text, seen):
    """Returns a request's tokens, which `seen` gets as they come."""
    options = frontend_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)
        request = frontend_pb2.GenerateRequest(options=options, text=text)
        async for response in stub.Generate(request):
            seen += response.output.token_ids
    return seen


def ask_all(services, seen):
    address = services.frontend.address
    return [
        asyncio.create_task(ask(address, text, each))
        for text, each in zip(TEXTS, seen, strict=True)
    ]


async def test_both_services_give_the_tokens_of_transformers(services, expected):
    assert await asyncio.gather(*ask_all(services, [[], [], []])) == expected
    # One rank alone has a request.
    assert await ask(services.frontend.address, TEXTS[0], []) == expected[0]
    async with engine_stub(services.engine.address) as stub:
        stats = await get_stats(stub)
    assert [each.data_parallel_rank for each in stats.ranks] == [0, 1]
    assert len(stats.rank_loads) == 2
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert stats.graph_dispatch["graph"] > 0
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"http://127.0.0.1:{METRICS_PORT}/metrics")).text
    free = [load.num_free_blocks for load in stats.rank_loads]
    for rank, sample in enumerate(re.findall(r"^octavo_rank_free_blocks\{.*\} (\S+)$", text, re.M)):
        assert float(sample) == free[rank]
    assert text.count("octavo_rank_waiting{") == 2


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
async def test_the_tokens_go_on_after_a_rank_is_lost(services, expected, rank, number):
    seen = [[], [], []]
    async with engine_stub(services.engine.address) as stub:
        before = await get_stats(stub)
        running = ask_all(services, seen)
        await until(lambda: len(seen[0]) >= NUM_TOKENS // 4)
        os.kill(before.ranks[rank].pid, number)
        assert await asyncio.gather(*running) == expected
        after = await get_stats(stub)
    assert after.num_worker_restarts == before.num_worker_restarts + 1


async def test_a_watcher_sees_the_step_of_each_rank(services, expected):
    async with engine_stub(services.engine.address) as stub:
        watching = stub.WatchSteps(WatchStepsRequest())
        await watching.initial_metadata()
        running = asyncio.create_task(ask(services.frontend.address, TEXTS[1], []))
        steps = [await watching.read() for _ in range(2)]
        watching.cancel()
        assert await running == expected[1]
    assert len({each.descriptor.step_id for each in steps}) == 1
    counts = [each.descriptor.context.num_tokens for each in steps]
    across = read_int32(steps[0].descriptor.dp_metadata.num_tokens_across_dp)
    assert across.tolist() == counts
    assert 0 in counts
    assert not any(each.result.token_ids or each.result.across_dp for each in steps)


async def test_a_snapshot_of_several_ranks_is_refused(services):
    async with engine_stub(services.engine.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="one data-parallel rank"):
            await stub.WatchSteps(WatchStepsRequest(include_snapshot=True)).read()
