"""Health over a real socket."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.transport.counts import LocalCounts
from services.transport.health import LIVENESS, Health
from services.transport.interceptors import ErrorInterceptor

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def serving():
    health = Health("api", counts=LocalCounts())
    server = grpc.aio.server(interceptors=[ErrorInterceptor(lambda error: None)])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health, health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


def ask(service):
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", "api"])
async def test_readiness_is_what_the_service_says(service):
    async with serving() as (health, stub):
        assert (await stub.Check(ask(service))).status == NOT_SERVING
        health.set_ready(True)
        assert (await stub.Check(ask(service))).status == SERVING
        assert health.is_ready


async def test_liveness_does_not_depend_on_readiness():
    async with serving() as (_, stub):
        assert (await stub.Check(ask(LIVENESS))).status == SERVING


async def test_an_unknown_service_is_not_found():
    async with serving() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Check(ask("other"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.Watch(ask("other")).read()).status == SERVICE_UNKNOWN


async def test_watchers_see_every_change_even_after_another_left():
    async with serving() as (health, stub):
        leaving, staying = stub.Watch(ask("")), stub.Watch(ask(""))
        for watch in (leaving, staying):
            assert (await watch.read()).status == NOT_SERVING
        leaving.cancel()
        for is_ready, status in ((True, SERVING), (False, NOT_SERVING)):
            health.set_ready(is_ready)
            async with asyncio.timeout(60):
                assert (await staying.read()).status == status


async def test_closing_ends_every_watch():
    async with serving() as (health, stub):
        watch = stub.Watch(ask(""))
        await watch.read()
        health.close()
        async with asyncio.timeout(60):
            assert await watch.read() is grpc.aio.EOF


class SlowContext:
    """A caller whose messages take a while to be sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.may_go_on = asyncio.Event()

    async def write(self, message) -> None:
        self.sent.append(message.status)
        await self.may_go_on.wait()


async def test_a_slow_watcher_sees_the_last_change_before_the_end():
    health, caller = Health("api", counts=LocalCounts()), SlowContext()
    health.set_ready(True)
    watching = asyncio.create_task(health._watch(ask(""), caller))
    await asyncio.sleep(0)
    health.set_ready(False)
    health.close()
    caller.may_go_on.set()
    await watching
    assert caller.sent == [SERVING, NOT_SERVING]
