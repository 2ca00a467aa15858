"""A gRPC server as both services want it: observed, checked and described."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.telemetry.grpc_options import server_options
from services.telemetry.health import Health
from services.telemetry.interceptors import ErrorInterceptor
from services.telemetry.message_limits import MessageLimits
from services.telemetry.message_reader import MessageReader
from services.telemetry.status import StatusMapper
from services.telemetry.tls import ServerTls


def make_server(
    service_name: str,
    *,
    health: Health,
    status_of: StatusMapper,
    max_message_bytes: int,
    max_connections: int,
    max_streams_per_connection: int,
    message_limits: MessageLimits,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Returns a server with health and reflection; the caller adds the service itself.

    Args:
        service_name: full name of the service's API, which reflection tells.
        health: answers grpc.health.v1.
        status_of: finds the status of an error that a servicer raised.
        max_message_bytes: largest message taken or sent.
        max_connections: connections taken at a time; more are closed at once.
        max_streams_per_connection: calls of one connection; more wait at its other end.
        message_limits: what one message may hold.
        interceptors: what calls go through beside the mapping of errors, outermost first.
    """
    options = server_options(max_message_bytes)
    options += [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_streams_per_connection),
    ]
    server = grpc.aio.server(
        interceptors=[
            ErrorInterceptor(status_of, MessageReader(message_limits)),
            *interceptors,
        ],
        options=options,
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
        raise OSError(f"cannot listen on {address}") from error
    return opened
