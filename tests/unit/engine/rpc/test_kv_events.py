"""Cached blocks as a stream, over a real socket, around a fake worker."""

import grpc
import numpy as np
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import GenerateRequest
from protos.engine.v1.kv_events_pb2 import KvEventCursor, KvTier, SubscribeKvEventsRequest
from services.engine.edge.open_streams import KV_EVENTS
from services.engine.kv_cache.block_events import BlockContent, Tier
from services.frontend.engine_client.prefix_keys import compact_keys, read_keys
from tests.support.engine_harness import SEED, engine_config, running_service
from tests.support.waiting import until

BLOCK_SIZE = 16
PROMPT = list(range(5, 55))
MANY = 300_000


def service_with_events(**flags):
    return running_service(engine_config(kv_events=True, **flags))


async def generate(service, prompt=PROMPT, **fields):
    """Runs a request of a prompt to its end."""
    request = GenerateRequest(
        prompt_token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(seed=SEED, max_tokens=2),
        **fields,
    )
    call = service.stub.Generate(request)
    while await call.read() is not grpc.aio.EOF:
        pass


def expected_keys(prompt=PROMPT):
    return compact_keys("", np.array(prompt, "<u4").tobytes(), BLOCK_SIZE, max_blocks=99)


def subscribe(service, **cursor):
    cursors = [KvEventCursor(**cursor)] if cursor else []
    return service.stub.SubscribeKvEvents(SubscribeKvEventsRequest(cursors=cursors))


async def read(stream, num_events=1):
    """Reads messages until they have `num_events` events."""
    messages = [await stream.read()]
    while sum(len(each.events) for each in messages) < num_events:
        messages.append(await stream.read())
    return messages


async def read_all(stream):
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_blocks_are_shown_only_where_the_operator_allows_it():
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await subscribe(service).read()
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_subscriber_gets_what_is_there_and_then_what_comes():
    async with service_with_events() as service:
        await generate(service)
        stream = subscribe(service)
        [snapshot] = await read(stream)
        assert (snapshot.snapshot.index, snapshot.snapshot.count) == (0, 1)
        [event] = snapshot.events
        assert read_keys(event.stored.keys) == expected_keys()
        assert event.stored.parent_key == b""
        assert np.frombuffer(event.stored.token_ids, "<i4").tolist() == PROMPT[:48]
        assert event.stored.tier == KvTier.KV_TIER_GPU
        longer = PROMPT + [7] * 20
        await generate(service, longer)
        [news] = await read(stream)
        assert not news.HasField("snapshot")
        assert news.sequence_number == snapshot.sequence_number + 1
        assert read_keys(news.events[0].stored.keys) == expected_keys(longer)[3:]
        assert news.events[0].stored.parent_key == event.stored.keys[-8:]
        stream.cancel()


async def test_salts_and_what_they_hide_are_not_told():
    async with service_with_events() as service:
        await generate(service, cache_salt="tenant")
        stream = subscribe(service)
        assert not (await stream.read()).events
        await generate(service, [9] * 20)
        [news] = await read(stream)
        assert read_keys(news.events[0].stored.keys) == expected_keys([9] * 20)
        stream.cancel()


async def test_a_subscriber_goes_on_where_it_was():
    async with service_with_events() as service:
        first = subscribe(service)
        number = (await first.read()).sequence_number
        first.cancel()
        await generate(service)
        [news] = await read(subscribe(service, sequence_number=number))
        assert not news.HasField("snapshot")
        assert read_keys(news.events[0].stored.keys) == expected_keys()


async def test_a_cursor_that_is_not_known_gets_a_snapshot():
    async with service_with_events() as service:
        await generate(service)
        [message] = await read(subscribe(service, sequence_number=17))
        assert message.snapshot.count == 1
        assert read_keys(message.events[0].stored.keys) == expected_keys()


async def test_a_lost_worker_clears_the_blocks_on_the_same_stream():
    async with service_with_events() as service:
        await generate(service)
        stream = subscribe(service)
        [snapshot] = await read(stream)
        service.executors.last.die()
        [cleared] = await read(stream)
        assert cleared.events[0].HasField("cleared")
        assert cleared.sequence_number == snapshot.sequence_number + 1
        await until(lambda: service.core.is_ready)
        await generate(service)
        [news] = await read(stream)
        assert read_keys(news.events[0].stored.keys) == expected_keys()
        stream.cancel()


async def test_a_subscriber_that_reads_nothing_is_cut_off():
    async with service_with_events(slow_reader_timeout_s=0.2) as service:
        stream = subscribe(service)
        await stream.initial_metadata()
        [record] = service.core.block_events
        for number in range(MANY):
            key = number.to_bytes(32, "little")
            record.stored(key, BlockContent(None, bytes(4 * BLOCK_SIZE)), Tier.GPU)
        await until(lambda: not service.server._counts.held(KV_EVENTS))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_all(stream)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tiers_are_told_apart():
    async with service_with_events() as service:
        [record] = service.core.block_events
        content = BlockContent(None, bytes(4 * BLOCK_SIZE))
        for tier in (Tier.GPU, Tier.HOST):
            record.stored(b"k" * 32, content, tier)
        record.removed(b"k" * 32, Tier.GPU)
        [message] = await read(subscribe(service))
        assert [event.stored.tier for event in message.events] == [KvTier.KV_TIER_HOST]


async def test_an_adapters_blocks_have_its_name():
    async with service_with_events() as service:
        [record] = service.core.block_events
        for number, adapter in enumerate(("sql", "")):
            record.stored(bytes([number]) * 32, BlockContent(None, bytes(64), adapter), Tier.GPU)
        stream = subscribe(service)
        events = [each for message in await read(stream, 2) for each in message.events]
        assert [each.stored.adapter for each in events] == ["sql", ""]
        stream.cancel()
