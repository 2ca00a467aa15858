"""Serves the HTTP API on its own port, in the frontend's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import structlog
import uvicorn
from uvicorn.server import ServerState

from services.frontend.http.app import make_app
from services.frontend.http.bodies.reader import BodyReader
from services.frontend.http.endpoint import Serving
from services.frontend.http.responses.store import ResponseStore, StoreLimits
from services.frontend.http.service.endpoints import ServiceEndpoints
from services.frontend.http.wire.body import Bodies
from services.frontend.http.wire.guarded_protocol import ConnectionLimits, GuardedProtocol
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.pipeline.pipeline import Pipeline
from services.processes.heartbeats import Heartbeats
from services.telemetry.metrics import Metrics
from services.transport.connections import Connections, Place
from services.transport.counts import Counts
from services.transport.hosts import AllowedHosts
from services.transport.listener import Listener
from services.transport.tls import ServerTls

GOODBYE_S = 1.0
"""Time for clients to read the end of their responses."""
BACKLOG = 2048
"""Connections that the kernel queues before they are accepted."""

log = structlog.get_logger()


class HttpServer:
    """The HTTP server: opens its port and shuts it down."""

    def __init__(  # noqa: PLR0913  the parts of a server
        self,
        pipeline: Pipeline,
        metrics: Metrics,
        *,
        body_reader: BodyReader,
        counts: Counts,
        connections: Connections,
        limits: ConnectionLimits,
        store_limits: StoreLimits,
        max_live_requests: int,
        cors_origins: Sequence[str],
        beats: Heartbeats | None,
        hosts: AllowedHosts | None,
        changes_adapters: bool = False,
        allows_sleep: bool = False,
    ) -> None:
        """Serves nothing until `start`; `beats` are those of several processes.

        changes_adapters, allows_sleep: whether vLLM's calls that do so are served.
        """
        self._live = LiveRequests(counts, max_requests=max_live_requests)
        self._body_reader = body_reader
        self._store = ResponseStore(store_limits)
        serving = Serving(
            pipeline=pipeline,
            live=self._live,
            bodies=Bodies(counts, max_bytes=limits.max_body_bytes),
            body_reader=body_reader,
            slow_reader_timeout_s=limits.slow_reader_timeout_s,
        )
        service = ServiceEndpoints(pipeline, self._live, metrics, beats)
        app = make_app(
            serving,
            service,
            self._store,
            cors_origins=cors_origins,
            hosts=hosts,
            changes_adapters=changes_adapters,
            allows_sleep=allows_sleep,
        )
        self._config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
        )
        self._config.load()
        self._connections = connections
        self._limits = limits
        self._state = ServerState()
        self._listener: Listener | None = None
        self._expiring: asyncio.Task[None] | None = None

    def start(
        self, host: str, port: int, tls: ServerTls | None = None, *, shares_port: bool = False
    ) -> int:
        """Opens the port and returns it; several processes may share one.

        Raises:
            OSError: the address cannot be listened on.
        """
        host = host.strip("[]")  # gRPC requires IPv6 addresses in brackets
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=shares_port
        )
        port = listening.getsockname()[1]
        self._listener = Listener(
            listening,
            self._connections,
            self._make_protocol,
            tls=None if tls is None else tls.ssl_context(),
            handshake_timeout_s=self._limits.header_timeout_s,
        )
        self._listener.start()
        self._expiring = asyncio.create_task(self._store.watch())
        log.info("http_listening", address=f"{host}:{port}", port=port, tls=tls is not None)
        return port

    def begin_drain(self) -> None:
        """Refuses new requests."""
        self._live.is_draining = True

    async def drain(self, timeout_s: float) -> None:
        """Closes the port and waits for running requests, not connections, up to `timeout_s`."""
        await self._close_port()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._live.wait_idle()

    async def close(self) -> None:
        """Ends everything that still runs, with an error to each client."""
        await self._close_port()
        self._live.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110  uvicorn's own sets
                    await asyncio.sleep(0.01)
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = set(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._expiring is not None:
            self._expiring.cancel()
        await self._body_reader.close()

    async def _close_port(self) -> None:
        self.begin_drain()
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        for connection in list(self._state.connections):
            connection.shutdown()

    def _make_protocol(self, place: Place) -> GuardedProtocol:
        return GuardedProtocol(self._config, self._state, self._limits, place)
