"""Cached blocks of real engines, followed from outside, and requests that go where they are."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import grpc
import httpx
import numpy as np
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import GenerateRequest, GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.engine.v1.kv_events_pb2 import KvEventCursor, SubscribeKvEventsRequest
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.frontend.engine_client.prefix_keys import compact_keys, read_keys
from tests.support.processes import free_port, start_engine, start_frontend
from tests.support.smg_gateway import missing_part, smg_gateway

FLAGS = {"kv_cache_memory_mb": 16, "kv_events": True}
PROMPT = list(range(5, 55))
STORY = [{"role": "user", "content": "Tell me a story of a cat who sat on a mat. " * 12}]


@asynccontextmanager
async def engine(**flags):
    async with (
        start_engine(**FLAGS, **flags) as process,
        grpc.aio.insecure_channel(process.address) as channel,
    ):
        yield process, EngineServiceStub(channel)


async def generate(stub, prompt=PROMPT):
    """Runs a request of a prompt to its end."""
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    call = stub.Generate(GenerateRequest(prompt_token_ids=prompt, sampling=sampling))
    while await call.read() is not grpc.aio.EOF:
        pass


async def num_cached_tokens(stub):
    return (await stub.GetStats(GetStatsRequest())).cached_tokens


def expected_keys(prompt=PROMPT):
    return compact_keys("", np.array(prompt, "<u4").tobytes(), 16, max_blocks=99)


async def test_a_subscriber_follows_an_engine_over_its_restart():
    port = free_port()
    async with engine(port=port) as (_, stub):
        await generate(stub)
        before = await stub.SubscribeKvEvents(SubscribeKvEventsRequest()).read()
        assert read_keys(before.events[0].stored.keys) == expected_keys()
    async with engine(port=port) as (_, stub):
        other = [9] * 40
        await generate(stub, other)
        cursor = KvEventCursor(sequence_number=before.sequence_number)
        after = await stub.SubscribeKvEvents(SubscribeKvEventsRequest(cursors=[cursor])).read()
        assert after.snapshot.count == 1
        assert after.sequence_number > before.sequence_number
        assert read_keys(after.events[0].stored.keys) == expected_keys(other)


async def test_a_frontend_sends_requests_where_their_blocks_are():
    prompt = [5 + 7 * number % 200 for number in range(160)]
    async with engine() as (first, stub), engine() as (second, other):
        await generate(other, prompt)
        addresses = f"{first.address},{second.address}"
        async with (
            start_frontend(addresses) as frontend,
            grpc.aio.insecure_channel(frontend.address) as channel,
        ):
            service = frontend_pb2_grpc.FrontendServiceStub(channel)
            async with asyncio.timeout(60):
                while not await num_known_blocks(service):  # noqa: ASYNC110  there is no event
                    await asyncio.sleep(0.02)
            request = frontend_pb2.GenerateRequest(
                options={"sampling": {"max_tokens": 3}}, tokens={"ids": prompt}
            )
            for _ in range(4):
                call = service.Generate(request)
                while await call.read() is not grpc.aio.EOF:
                    pass
        assert await num_cached_tokens(other) == 4 * 144  # the last block is computed
        assert await num_cached_tokens(stub) == 0


async def num_known_blocks(service):
    listed = await service.ListEngines(frontend_pb2.ListEnginesRequest())
    return sum(each.num_known_prefixes for each in listed.engines)


@pytest.mark.skipif(bool(missing_part()), reason=missing_part())
async def test_smg_sends_requests_where_their_blocks_are(tmp_path):
    folder = shutil.copytree(TINY_CHECKPOINT, tmp_path / "tiny")
    flags = {"model": folder, "vllm_grpc": True}

    async def chat(url):
        body = {"model": "tiny", "messages": STORY, "max_tokens": 3}
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text

    async with engine(**flags) as (first, stub), engine(**flags) as (second, other):
        with smg_gateway(second.address, "tiny") as url:
            await chat(url)
        # This gateway has sent nothing anywhere: it knows of the blocks by the events alone.
        addresses = (f"grpc://{second.address}", "--policy", "cache_aware")
        with smg_gateway(first.address, "tiny", *addresses) as url:
            for _ in range(4):
                await chat(url)
        assert await num_cached_tokens(stub) == 0
        assert await num_cached_tokens(other) > 4 * 64
