"""A gRPC server as both services want it: observed, checked and described."""

import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.transport.callers import Party, by_address
from services.transport.counts import Counts
from services.transport.grpc_options import ServerLimits, server_options
from services.transport.health import Health
from services.transport.interceptors import ErrorInterceptor
from services.transport.requests import RequestReceiver
from services.transport.status import StatusMapper
from services.transport.tls import ServerTls


def make_server(
    service_name: str,
    *,
    health: Health,
    status_of: StatusMapper,
    max_message_bytes: int,
    limits: ServerLimits,
    counts: Counts,
    party: Party = by_address,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Returns a server with health and reflection; the caller adds the service itself.

    Args:
        service_name: full name of the service's API, for reflection.
        health: answers grpc.health.v1.
        status_of: finds the status of an error that a servicer raised.
        max_message_bytes: largest message sent.
        limits: limits of what callers open and send.
        counts: where messages and sessions are counted against their limits.
        party: names the caller that a call counts against.
        interceptors: checks of callers, outermost first; they run before a request is received.
    """
    server = grpc.aio.server(
        interceptors=[
            ErrorInterceptor(status_of),
            *interceptors,
            RequestReceiver(limits, counts, party),
        ],
        options=server_options(limits, max_send_bytes=max_message_bytes),
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflected = (service_name, health_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(reflected, server)
    return server


def listen(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None = None) -> int:
    """Opens the server's port and returns it; port 0 takes a free one.

    Args:
        server: the server.
        host: address to listen on.
        port: port to listen on.
        tls: certificates; None speaks plain text.

    Raises:
        OSError: the address cannot be listened on.
    """
    address = f"{host}:{port}"
    try:
        if tls is None:
            opened: int = server.add_insecure_port(address)
        else:
            opened = server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}{_reason(host, port)}") from error
    return opened


def _reason(host: str, port: int) -> str:
    """Returns why an address cannot be listened on, which gRPC does not say; empty if unknown."""
    try:
        [found, *_] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        with socket.socket(found[0]) as probe:
            probe.bind(found[4])
    except OSError as error:
        return f": {error.strerror}"
    return ""
