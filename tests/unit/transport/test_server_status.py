"""A server's status is known, though grpc replaces it where the stream ended under a write."""

import asyncio
import contextlib

import grpc
import pytest

from protos.engine.v1.node_pb2 import Beat, NodeMessage
from protos.engine.v1.node_pb2_grpc import (
    NodeServiceServicer,
    NodeServiceStub,
    add_NodeServiceServicer_to_server,
)
from services.transport import server_status
from services.transport.server_status import ServerStatus

NUM_CALLS = 50


class EndsStreams(NodeServiceServicer):
    """Ends each stream after its first message."""

    def __init__(self, code, details):
        self.code, self.details = code, details

    async def Join(self, messages, context):  # noqa: N802  the protocol's name
        await anext(messages)
        context.set_code(self.code)
        context.set_details(self.details)


async def write_on(call):
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        while True:
            await call.write(NodeMessage(beat=Beat()))


@pytest.mark.parametrize(
    "end",
    [
        (grpc.StatusCode.OK, ""),
        (grpc.StatusCode.ABORTED, "its reason"),
        (grpc.StatusCode.INTERNAL, "another fault"),
    ],
)
async def test_the_servers_status_outlives_a_write_that_fails(end):
    server = grpc.aio.server()
    add_NodeServiceServicer_to_server(EndsStreams(*end), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(NUM_CALLS):
            call = NodeServiceStub(channel).Join()
            status = ServerStatus(call)
            assert await asyncio.gather(write_on(call), status.wait()) == [None, end]
            assert await status.wait() == end
    await server.stop(None)


class FailedCall:
    """A call of which no server ever says anything."""

    async def code(self):
        return grpc.StatusCode.INTERNAL

    async def details(self):
        return "Internal error from Core"

    def add_done_callback(self, callback):
        callback(self)


async def test_a_status_that_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(server_status, "WAIT_S", 0.02)
    code, details = await ServerStatus(FailedCall()).wait()
    assert (code, details) == (grpc.StatusCode.INTERNAL, "Internal error from Core")
