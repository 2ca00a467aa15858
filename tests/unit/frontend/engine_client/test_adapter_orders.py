"""Orders about adapters to an engine whose session ends."""

import asyncio

import grpc
import pytest

from protos.engine.v1.operator_pb2_grpc import (
    OperatorServiceServicer,
    add_OperatorServiceServicer_to_server,
)
from services.frontend.engine_client.adapter_orders import AdapterOrders
from services.frontend.errors import EngineUnavailableError


class Busy(OperatorServiceServicer):
    """Reads an adapter for ever."""

    def __init__(self):
        self.is_reading = asyncio.Event()

    async def LoadAdapter(self, request, context):  # noqa: N802
        del request, context
        self.is_reading.set()
        await asyncio.Event().wait()


async def test_a_lost_engine_is_unavailable_during_and_after_its_session():
    busy, server = Busy(), grpc.aio.server()
    add_OperatorServiceServicer_to_server(busy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            orders = AdapterOrders(channel)
            loading = asyncio.create_task(orders.load("sql", "sql"))
            await busy.is_reading.wait()
        for order in (loading, orders.remove("sql")):
            with pytest.raises(EngineUnavailableError, match="the engine was lost"):
                await order
    finally:
        await server.stop(0)


async def test_an_engine_that_stops_says_no_more_than_that():
    busy, server = Busy(), grpc.aio.server()
    add_OperatorServiceServicer_to_server(busy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        loading = asyncio.create_task(AdapterOrders(channel).load("sql", "sql"))
        await busy.is_reading.wait()
        await server.stop(None)
        with pytest.raises(EngineUnavailableError, match="ended before it answered; its log says"):
            await loading


async def test_an_order_that_its_caller_cancels_is_cancelled():
    busy, server = Busy(), grpc.aio.server()
    add_OperatorServiceServicer_to_server(busy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            loading = asyncio.create_task(AdapterOrders(channel).load("sql", "sql"))
            await busy.is_reading.wait()
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
    finally:
        await server.stop(0)
