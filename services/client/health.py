"""Whether a service answers, by grpc.health.v1 and over HTTP."""

import asyncio
import http.client
import ssl
from contextlib import closing, suppress

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.client.calls import connected
from services.client.channel import PLAIN, Tls
from services.client.errors import OctavoError, UnavailableError

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
    request = health_pb2.HealthCheckRequest(service=service)
    async with connected(health_pb2_grpc.HealthStub, address, tls) as stub:
        response = await stub.Check(request, timeout=timeout_s)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def is_http_serving(host: str, port: int, *, timeout_s: float = 2.0, tls: Tls = PLAIN) -> bool:
    """Asks the HTTP API once whether it takes requests.

    Raises:
        OctavoError: it does not answer, or not in time.
    """
    if tls.tls_ca is None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    else:
        context = ssl.create_default_context(cafile=tls.tls_ca)
        if tls.tls_cert is not None:
            context.load_cert_chain(tls.tls_cert, tls.tls_key)
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    with closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException) as error:
            message = f"HTTP at {host}:{port} does not answer: {error}"
            raise UnavailableError(message, code="UNAVAILABLE") from None


async def wait_until_serving(address: str, tls: Tls = PLAIN, *, service: str = READINESS) -> None:
    """Waits until `service` at `address` is SERVING."""
    while True:
        with suppress(OctavoError):
            if await is_serving(address, service=service, tls=tls):
                return
        await asyncio.sleep(_POLL_S)
