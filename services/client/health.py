"""Whether a service answers, by grpc.health.v1."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.client.channel import PLAIN, Tls, open_channel
from services.client.errors import OctavoError, error_of_call

READINESS = ""
"""Name of the health service that reports readiness."""
LIVENESS = "liveness"
"""Name of the health service that reports whether the process answers at all."""
_POLL_S = 0.05


async def is_serving(
    address: str, *, service: str = READINESS, timeout_s: float = 2.0, tls: Tls = PLAIN
) -> bool:
    """Asks `address` once whether `service` is SERVING.

    Raises:
        OctavoError: the service does not answer, or not in time.
    """
    async with open_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_until_serving(address: str, tls: Tls = PLAIN) -> None:
    """Waits until the service at `address` takes requests."""
    while True:
        with suppress(OctavoError):
            if await is_serving(address, tls=tls):
                return
        await asyncio.sleep(_POLL_S)
