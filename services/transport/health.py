"""grpc.health.v1, with liveness and readiness apart."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.transport.callers import by_address
from services.transport.counts import Counts
from services.transport.held_counts import holding
from services.transport.status import RefusedCallError, Status

LIVENESS = "liveness"
"""Health service that answers SERVING as long as the process answers at all."""

MAX_WATCHES = 256
MAX_WATCHES_PER_ADDRESS = 16
"""Watches need no key and last as long as their callers like, so few are open at a time."""

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health is untyped
    """Liveness is true while the process answers; readiness is what the service says of itself.

    A check of service "" or of the API's full name reports readiness, "liveness" reports liveness.
    Watch streams every change. The servicer of grpcio-health-checking is not used: there one
    watcher that leaves silences the others, and one that does not read blocks the next change.
    """

    def __init__(self, *service_names: str, counts: Counts) -> None:
        """Answers for the services of these names.

        Args:
            service_names: full names of APIs whose readiness is asked for by name.
            counts: where watches are counted against their limits.
        """
        self._counts = counts
        self._readiness = frozenset(("", *service_names))
        self._is_ready = False
        self._is_closed = False
        self._watchers: set[asyncio.Event] = set()

    @property
    def is_ready(self) -> bool:
        """Whether the service said that it takes requests."""
        return self._is_ready

    def set_ready(self, is_ready: bool) -> None:
        """Sets readiness and notifies watchers of a change."""
        self._is_ready = is_ready
        self._wake_watchers()

    def close(self) -> None:
        """Ends every watch, so that a server can stop without waiting for its watchers."""
        self._is_closed = True
        self._wake_watchers()

    async def Check(  # noqa: N802  the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Answers one probe; NOT_FOUND for a service that is not here."""
        status = self._status_of(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            message = f"no service {request.service!r} here"
            raise RefusedCallError(Status(grpc.StatusCode.NOT_FOUND, message))
        return _Response(status=status)

    async def Watch(  # noqa: N802  the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the status now and after every change; a slow watcher sees only the latest."""
        with holding(
            self._counts,
            ("watches", MAX_WATCHES),
            (f"watches/{by_address(context)}", MAX_WATCHES_PER_ADDRESS),
        ):
            await self._watch(request, context)

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last_sent = None
            while True:
                status = self._status_of(request.service)
                if status != last_sent:
                    await context.write(_Response(status=status))
                    last_sent = status
                    continue  # the status may have changed while the write waited
                if self._is_closed:
                    return
                changed.clear()
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _status_of(self, service: str) -> int:
        if service == LIVENESS:
            return int(_Response.SERVING)
        if service not in self._readiness:
            return int(_Response.SERVICE_UNKNOWN)
        return int(_Response.SERVING if self._is_ready else _Response.NOT_SERVING)

    def _wake_watchers(self) -> None:
        for changed in self._watchers:
            changed.set()
