"""The service as a whole, around a fake worker."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.engine.server import SERVICE_NAME, EngineServer
from services.transport.health import LIVENESS
from tests.support.engine_harness import engine_config, model_folder, running_service
from tests.support.fake_executor import FakeExecutor

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(service, name):
    stub = health_pb2_grpc.HealthStub(service.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_health_follows_the_worker_and_the_drain():
    async with running_service() as service:
        assert await status(service, SERVICE_NAME) == SERVING
        await service.core.drain.run(1)
        assert await status(service, SERVICE_NAME) == NOT_SERVING
        assert await status(service, LIVENESS) == SERVING


async def test_reflection_lists_the_services():
    async with running_service() as service:
        stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {entry.name for entry in answer.list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


async def test_a_worker_that_cannot_start_at_all_means_exit_status_1():
    async with running_service(start_error="no weights") as service:
        assert await service.server.wait() == 1


async def test_a_taken_port_is_an_error_that_names_the_address():
    async with running_service() as service:
        config = engine_config(port=service.port)
        other = EngineServer(config, model_folder(), lambda: FakeExecutor(config))
        with pytest.raises(OSError, match=f"{service.port}: Address already in use"):
            await other.start()
        await other.stop()


async def test_a_drained_engine_stops_without_waiting_for_watchers():
    async with running_service() as service:
        watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await service.core.drain.run(1)
        assert await service.server.wait() == 0
        await service.server.stop()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
