"""A request's stream at a model that shares its card: it waits for turns and loses no token."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from protos.engine.v1.engine_pb2 import Finished
from services.frontend.engine_client.messages import (
    ABORTED,
    LENGTH,
    EngineRequest,
    ModelInfo,
    TokenSink,
    Usage,
    pack_uint32,
)
from services.frontend.engine_client.pool import PoolLimits
from services.frontend.engine_client.routing_counts import RoutingCounts
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.errors import EngineUnavailableError, OverloadedError
from services.frontend.pipeline.samples import wait_until_admitted
from tests.support.shared_card import Card, now, sharing, virtual

PROMPT = [5, 6, 7]
ASLEEP = EngineUnavailableError("the engine is asleep")


@dataclass(frozen=True, eq=False)
class Engine:
    address: SimpleNamespace


class Pool:
    """Notes what is sent; a test answers it."""

    def __init__(self, card: Card) -> None:
        self.swapper = card.swapper
        self.limits = PoolLimits()
        self.counts = RoutingCounts()
        self.sent: list[tuple[EngineRequest, TokenSink]] = []
        self.num_aborted = 0

    def send(
        self,
        request: EngineRequest,
        sink: TokenSink,
        *,
        model: ModelInfo,
        tried: Collection[object],
    ):
        if tried:
            raise EngineUnavailableError("no other engine")
        self.sent.append((request, sink))
        return Engine(SimpleNamespace(target=model.model)), self._abort

    def _abort(self) -> None:
        self.num_aborted += 1


def open_stream(pool: Pool, model: str) -> TokenStream:
    request = EngineRequest(request_id=f"of-{model}", prompt_token_ids=pack_uint32(PROMPT))
    return TokenStream(pool, request, model=ModelInfo(model=model, max_model_len=100))


def finish(sink: TokenSink) -> None:
    sink.put_finished(Finished(finish_reason=LENGTH, usage=Usage(output_tokens=2)))


@virtual
async def test_a_request_is_sent_in_its_turn_and_frees_the_card_at_its_end():
    async with sharing("a", "b", min_awake_s=5) as card:
        pool = Pool(card)
        first, second = open_stream(pool, "a"), open_stream(pool, "b")
        reading = asyncio.create_task(first.read())
        admitting = asyncio.create_task(second.admitted())
        await asyncio.sleep(3)
        [(request, sink)] = pool.sent
        assert request.request_id == "of-a"
        sink.put([8, 9], ())
        assert (await reading).token_ids == [8, 9]
        finish(sink)
        await asyncio.sleep(3)
        assert not admitting.done()
        assert [each.request_id for each, _ in pool.sent] == ["of-a", "of-b"]
        pool.sent[1][1].put_admitted("")
        await admitting
        finish(pool.sent[1][1])
        assert card.woken == ["a", "b"]


@virtual
async def test_a_request_that_came_too_late_waits_again_with_its_tokens():
    async with sharing("a", "b", min_awake_s=1, drain_s=1) as card:
        pool = Pool(card)
        stream = open_stream(pool, "a")
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(2)
        pool.sent[0][1].put([8], ())
        assert (await reading).token_ids == [8]
        other = card.start("b", 1)
        await asyncio.sleep(2.2)
        assert card.swapper.is_swapped_out("a")
        pool.sent[0][1].put_error(ASLEEP)
        reading = asyncio.create_task(stream.read())
        await other
        await asyncio.sleep(3)
        assert len(pool.sent) == 2
        request, sink = pool.sent[1]
        assert request.prompt_token_ids == pack_uint32([*PROMPT, 8])
        assert request.num_resumed_tokens == 1
        sink.put([9], ())
        assert (await reading).token_ids == [9]
        finish(sink)
        assert (await stream.read()).finish_reason == LENGTH
        assert card.woken == ["a", "b", "a"]


@virtual
async def test_a_request_aborted_while_it_waits_ends_unsent():
    async with sharing("a", "b") as card:
        pool = Pool(card)
        running = card.start("a", 5)
        await asyncio.sleep(2)
        stream = open_stream(pool, "b")
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        assert card.swapper.num_waiting == {"a": 0, "b": 1}
        stream.abort()
        batch = await reading
        assert (batch.finish_reason, batch.usage.prompt_tokens) == (ABORTED, len(PROMPT))
        unread = open_stream(pool, "b")
        unread.abort()
        assert (await unread.read()).finish_reason == ABORTED
        await running
        assert card.woken == ["a"]
        assert pool.sent == []
        assert pool.num_aborted == 0


@virtual
async def test_a_failure_of_the_awake_engine_is_reported():
    async with sharing("a") as card:
        pool = Pool(card)
        for error in (EngineUnavailableError("lost"), OverloadedError("full", retry_after_ms=1)):
            stream = open_stream(pool, "a")
            reading = asyncio.create_task(stream.read())
            await asyncio.sleep(2)
            pool.sent[-1][1].put_error(error)
            with pytest.raises(type(error), match=str(error)):
                await reading


@virtual
async def test_a_full_queue_refuses_the_stream():
    async with sharing("a", "b", max_waiting=1) as card:
        pool = Pool(card)
        running = card.start("a", 5)
        await asyncio.sleep(2)
        waiting = asyncio.create_task(open_stream(pool, "b").admitted())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 requests wait"):
            await open_stream(pool, "b").admitted()
        waiting.cancel()
        await running


@asynccontextmanager
async def refused_stream(*, unread: Sequence[int] = ()):
    """Yields a pool and a stream that gave token 8 and was refused as its model fell asleep."""
    async with sharing("a", "b", min_awake_s=1, drain_s=1) as card:
        pool = Pool(card)
        stream = open_stream(pool, "a")
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(2)
        pool.sent[0][1].put([8], ())
        assert (await reading).token_ids == [8]
        other = card.start("b", 1)
        await asyncio.sleep(2.2)
        pool.sent[0][1].put(unread, ())
        pool.sent[0][1].put_error(ASLEEP)
        yield pool, stream
        await other


@virtual
async def test_a_refused_request_that_is_aborted_before_it_is_read_is_not_sent_again():
    async with refused_stream(unread=[9]) as (pool, stream):
        stream.abort()
        batch = await stream.read()
        assert (batch.token_ids, batch.finish_reason) == ([9], ABORTED)
        assert (batch.usage.prompt_tokens, batch.usage.output_tokens) == (len(PROMPT), 2)
        await asyncio.sleep(5)
        assert len(pool.sent) == 1


@virtual
async def test_unread_tokens_of_a_refused_request_do_not_come_twice():
    async with refused_stream(unread=[9]) as (pool, stream):
        admitting = asyncio.create_task(stream.admitted())
        await asyncio.sleep(5)
        request, sink = pool.sent[1]
        assert request.prompt_token_ids == pack_uint32([*PROMPT, 8])
        sink.put([9, 10], ())
        await admitting
        assert (await stream.read()).token_ids == [9, 10]
        finish(sink)


@virtual
async def test_a_request_aborted_as_its_turn_begins_is_not_sent():
    async with sharing("a") as card:
        pool = Pool(card)
        stream = open_stream(pool, "a")
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        [turn] = card.swapper._seats[card.engines[0]].waiting
        turn.begin(now())
        stream.abort()
        assert (await reading).finish_reason == ABORTED
        assert pool.sent == []


@virtual
async def test_all_samples_of_a_request_take_the_same_turn():
    async with sharing("a", "b") as card:
        pool = Pool(card)
        streams = [open_stream(pool, "a") for _ in range(3)]
        admitting = asyncio.create_task(wait_until_admitted(streams))
        await asyncio.sleep(2)
        assert len(pool.sent) == len(streams)
        for _, sink in pool.sent:
            sink.put_admitted("")
        await admitting
        for _, sink in pool.sent:
            finish(sink)
