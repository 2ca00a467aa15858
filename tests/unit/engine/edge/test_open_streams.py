"""Streams that send much for a small request are few, and end when they are not read."""

import asyncio
from contextlib import ExitStack

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from protos.engine.v1.engine_pb2 import GetTokenizerRequest, WatchStepsRequest
from services.engine.edge.open_streams import (
    MAX_STREAMS,
    PARTS_PER_ADDRESS,
    TOKENIZER,
    WATCH,
    OpenStreams,
    write_in_time,
)
from services.engine.errors import QueueFullError, SlowReaderError
from services.transport.counts import LocalCounts
from tests.support.engine_harness import engine_config, running_service
from tests.support.waiting import until


class Call:
    """A call of some peer, whose writes wait for `reads`."""

    def __init__(self, peer: str = "ipv4:192.0.2.1:1") -> None:
        self.reads = asyncio.Event()
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    async def write(self, message: object) -> None:
        del message
        await self.reads.wait()


def call_from(host: int, port: int = 1) -> Call:
    return Call(f"ipv4:192.0.2.{host}:{port}")


@pytest.mark.parametrize("kind", [TOKENIZER, WATCH])
def test_one_address_holds_a_part_and_all_together_hold_no_more_than_the_limit(kind):
    counts, most = LocalCounts(), MAX_STREAMS[kind] // PARTS_PER_ADDRESS
    streams = OpenStreams(counts)
    with ExitStack() as held:
        for host in range(PARTS_PER_ADDRESS):
            for port in range(most):
                held.enter_context(streams.hold(kind, call_from(host, port)))
            with (
                pytest.raises(QueueFullError, match=f"{most} .* of this address"),
                streams.hold(kind, call_from(host, most)),
            ):
                pass
        with (
            pytest.raises(QueueFullError, match=f"{MAX_STREAMS[kind]} .* are open"),
            streams.hold(kind, call_from(99)),
        ):
            pass
        assert counts.held(kind) == MAX_STREAMS[kind]
        assert not counts.held(f"{kind}/address/192.0.2.99")
    assert not counts.held(kind)
    with streams.hold(kind, call_from(99)):
        assert counts.held(kind) == 1


async def test_an_unread_write_ends_the_stream():
    call = Call()
    with pytest.raises(SlowReaderError, match="lay unread"):
        await write_in_time(call, b"", 0.01)
    call.reads.set()
    await write_in_time(call, b"", 60)


async def test_watchers_beyond_the_limit_are_refused_until_one_leaves(monkeypatch):
    monkeypatch.setitem(MAX_STREAMS, WATCH, 2 * PARTS_PER_ADDRESS)
    async with running_service() as service:
        watchers = [service.stub.WatchSteps(WatchStepsRequest()) for _ in range(2)]
        for watcher in watchers:
            await watcher.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.stub.WatchSteps(WatchStepsRequest()).read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        watchers[0].cancel()
        await until(lambda: len(service.core.watchers._watchers) == 1)
        later = service.stub.WatchSteps(WatchStepsRequest())
        await later.initial_metadata()
        later.cancel()
        watchers[1].cancel()


async def test_both_protocols_count_their_streams_of_tokenizers_together(monkeypatch):
    monkeypatch.setitem(MAX_STREAMS, TOKENIZER, 0)
    async with running_service(engine_config(vllm_grpc=True)) as service:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(service.channel)
        for call in (
            service.stub.GetTokenizer(GetTokenizerRequest()),
            stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
