"""Cached blocks in the gateway's protocol, over a real socket, around a fake worker."""

from contextlib import asynccontextmanager

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated.common_pb2 import SubscribeKvEventsRequest
from smg_grpc_proto.generated.vllm_engine_pb2 import GenerateRequest

from services.engine.edge.kv_events import SNAPSHOT_BLOCKS, EventPart
from services.engine.kv_cache.block_events import BlockContent, Removed, Stored, Tier
from services.engine.vllm.kv_events import part_to_batch
from tests.support.engine_harness import SEED, engine_config, running_service

PROMPT = list(range(5, 55))


@asynccontextmanager
async def gateway(**flags):
    async with running_service(engine_config(vllm_grpc=True, **flags)) as service:
        yield service, vllm_engine_pb2_grpc.VllmEngineStub(service.channel)


async def generate(stub):
    request = GenerateRequest(
        request_id="r",
        tokenized={"input_ids": PROMPT},
        sampling_params={"seed": SEED, "max_tokens": 2},
    )
    call = stub.Generate(request)
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_the_method_is_not_there_unless_the_operator_allows_it():
    async with gateway() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.SubscribeKvEvents(SubscribeKvEventsRequest()).read()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stored_blocks_have_tokens_and_parents():
    async with gateway(kv_events=True) as (_, stub):
        stream = stub.SubscribeKvEvents(SubscribeKvEventsRequest())
        empty = await stream.read()
        assert [each.WhichOneof("data") for each in empty.events] == ["cleared"]
        assert (empty.snapshot.count, empty.dp_rank) == (1, 0)
        await generate(stub)
        batch = await stream.read()
        assert batch.sequence_number == empty.sequence_number + 1
        [stored] = [each.stored for each in batch.events]
        assert stored.tier == common_pb2.KV_CACHE_TIER_DEVICE
        assert [list(each.token_ids) for each in stored.blocks] == [
            PROMPT[start : start + 16] for start in (0, 16, 32)
        ]
        assert not stored.HasField("parent_block_hash")
        stream.cancel()
        late = stub.SubscribeKvEvents(SubscribeKvEventsRequest())
        snapshot = await late.read()
        assert snapshot.events[1].stored == stored
        late.cancel()
        resumed = stub.SubscribeKvEvents(
            SubscribeKvEventsRequest(start_sequence_number=batch.sequence_number)
        )
        assert (await resumed.read()).events == batch.events
        resumed.cancel()


async def test_parts_of_a_snapshot_have_numbers_up_to_its_own():
    async with gateway(kv_events=True) as (service, stub):
        [record] = service.core.block_events
        for number in range(2 * SNAPSHOT_BLOCKS + 1):
            record.stored(bytes([*divmod(number, 256)]) * 16, BlockContent(None, b""), Tier.DISK)
        stream = stub.SubscribeKvEvents(SubscribeKvEventsRequest())
        parts = [await stream.read() for _ in range(3)]
        number, _ = record.snapshot()
        assert [each.sequence_number for each in parts] == [number - 2, number - 1, number]
        assert [each.snapshot.index for each in parts] == [0, 1, 2]
        stream.cancel()


def test_blocks_without_tokens_are_left_out():
    stored = Stored(b"k" * 32, Tier.GPU, BlockContent(None, None))
    removed = Removed(b"\xff" * 32, Tier.GPU)
    batch = part_to_batch(EventPart(rank=1, number=9, events=[stored, removed]), 16)
    [event] = batch.events
    assert list(event.removed.block_hashes) == [-1]
    assert batch.dp_rank == 1


def test_an_adapters_blocks_have_its_name():
    own, plain = (
        Stored(bytes([number]) * 32, Tier.GPU, BlockContent(None, b"\0" * 64, adapter))
        for number, adapter in enumerate(("sql", ""))
    )
    batch = part_to_batch(EventPart(rank=0, number=9, events=[own, plain]), 16)
    assert [event.stored.lora_name for event in batch.events] == ["sql", ""]
    assert [event.stored.HasField("lora_name") for event in batch.events] == [True, False]
