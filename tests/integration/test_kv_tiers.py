"""Real engines with blocks on disk: killed, damaged, and full.

An engine loads what is faster to load than to compute, by times that it measures. Before its first
prompt it loads everything, so the prompt that must come back is the first of its engine.
"""

import asyncio
import signal
from contextlib import asynccontextmanager

import grpc

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import GenerateRequest, GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from tests.support.processes import start_engine

PROMPT = [5 + (7 * i * i + 3 * i) % 90 for i in range(100)]
NUM_CACHED = 96
"""Whole blocks of 16 tokens before the last token."""


@asynccontextmanager
async def engine(folder, **flags):
    sizes = {"num_kv_blocks": 64, "host_kv_gb": 0.02, "disk_kv_dir": folder}
    async with (
        start_engine(**(sizes | flags)) as process,
        grpc.aio.insecure_channel(process.address) as channel,
    ):
        yield process, EngineServiceStub(channel)


async def generate(stub, *, prompt=PROMPT, salt="") -> tuple[list[int], int]:
    """Returns the output and the cached tokens of the prompt."""
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, cache_salt=salt)
    token_ids = []
    async for response in stub.Generate(request):
        token_ids += response.token_ids
    return token_ids, response.usage.cached_tokens


async def written(stub, num_blocks):
    """Waits until the disk has as many blocks."""

    async def are_written():
        return (await stub.GetStats(GetStatsRequest())).num_disk_blocks >= num_blocks

    async with asyncio.timeout(60):
        while not await are_written():  # noqa: ASYNC110  another process has no event
            await asyncio.sleep(0.02)


async def test_an_engine_that_was_killed_finds_its_prefixes(tmp_path):
    folder = tmp_path / "blocks"
    async with engine(folder) as (process, stub):
        expected, num_cached = await generate(stub)
        assert num_cached == 0
        await written(stub, NUM_CACHED // 16)
        process.signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    async with engine(folder) as (_, stub):
        assert await generate(stub) == (expected, NUM_CACHED)
        assert await generate(stub, salt="other") == (expected, 0)
        stats = await stub.GetStats(GetStatsRequest())
        assert stats.disk_hit_tokens == NUM_CACHED
        assert stats.num_disk_faults == 0
    # A form of blocks of its own.
    async with engine(folder, block_size=32) as (_, stub):
        assert await generate(stub) == (expected, 0)


async def test_damaged_files_are_counted_and_computed(tmp_path):
    folder = tmp_path / "blocks"
    async with engine(folder) as (_, stub):
        expected, _ = await generate(stub)
        await written(stub, NUM_CACHED // 16)
    for path in folder.rglob("*.block"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    async with engine(folder) as (_, stub):
        assert await generate(stub) == (expected, 0)
        stats = await stub.GetStats(GetStatsRequest())
        assert stats.num_disk_faults >= NUM_CACHED // 16
        assert stats.disk_read_s == 0
        # They are written again.
        await written(stub, NUM_CACHED // 16)
    async with engine(folder) as (_, stub):
        assert await generate(stub) == (expected, NUM_CACHED)


async def test_a_small_limit_of_the_disk_changes_no_text(tmp_path):
    folder = tmp_path / "blocks"
    prompts = [PROMPT[start:] + PROMPT[:start] for start in range(0, 100, 7)]
    async with engine(folder, enable_prefix_caching=False, host_kv_gb=0, disk_kv_dir=None) as (
        _,
        stub,
    ):
        expected = [(await generate(stub, prompt=prompt))[0] for prompt in prompts]
    async with engine(folder, disk_kv_gb=0.0005, num_kv_blocks=16) as (_, stub):
        for _ in range(2):
            outputs = [(await generate(stub, prompt=prompt))[0] for prompt in prompts]
            assert outputs == expected
    # A running engine goes on writing files and removing others.
    used = sum(path.stat().st_size for path in folder.rglob("*.block"))
    assert 0 < used <= 0.0005 * 2**30
