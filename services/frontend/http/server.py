"""Serves the HTTP API on a port of its own, inside the frontend's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.frontend.access.gate import Gate
from services.frontend.http.access import RequireKey
from services.frontend.http.app import make_app
from services.frontend.http.body_reader import BodyReader
from services.frontend.http.guarded_protocol import limited
from services.frontend.http.live_requests import LiveRequests
from services.frontend.pipeline.pipeline import Pipeline
from services.telemetry.metrics import Metrics
from services.telemetry.tls import ServerTls

GOODBYE_S = 1.0
"""Time that clients have to read the end of their responses."""

log = structlog.get_logger()


class HttpServer:
    """The HTTP API: opens its port, and takes it down in good order."""

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: Metrics,
        *,
        bodies: BodyReader,
        max_live_requests: int,
        slow_reader_timeout_s: float,
        max_connections: int,
        header_timeout_s: float,
        gate: Gate,
    ) -> None:
        self._live = LiveRequests(max_requests=max_live_requests)
        self._bodies = bodies
        app: ASGIApp = make_app(
            pipeline,
            self._live,
            bodies,
            metrics,
            slow_reader_timeout_s=slow_reader_timeout_s,
        )
        if gate.requires_keys:
            app = RequireKey(app, gate)
        self._config = uvicorn.Config(
            app,
            http=limited(max_connections=max_connections, header_timeout_s=header_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        self._server = _QuietServer(self._config)
        self._serving: asyncio.Task[None] | None = None

    def start(self, host: str, port: int, tls: ServerTls | None = None) -> int:
        """Opens the port and returns it; port 0 takes a free one.

        Args:
            host: address to listen on.
            port: port to listen on.
            tls: certificates; None speaks plain text.

        Raises:
            OSError: the address cannot be listened on.
        """
        host = host.strip("[]")  # gRPC wants IPv6 addresses in brackets
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if tls is not None:
            context = tls.ssl_context()
            self._config.ssl_context_factory = lambda config, default: context
        listener = socket.create_server((host, port), family=family)
        port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]))
        log.info("http_listening", address=f"{host}:{port}", port=port, tls=tls is not None)
        return port

    def begin_drain(self) -> None:
        """Refuses new requests."""
        self._live.is_draining = True

    async def drain(self, timeout_s: float) -> None:
        """Closes the port and lets the running requests finish, for `timeout_s` at most.

        Connections are not waited for: a client that does not read keeps its own open.
        """
        self.begin_drain()
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._live.wait_idle()

    async def close(self) -> None:
        """Ends everything that still runs; its clients are told."""
        if self._serving is None:
            return
        self.begin_drain()
        self._live.end()
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=GOODBYE_S)
        self._server.force_exit = True
        self._serving.cancel()
        await asyncio.wait({self._serving})
        await self._bodies.close()


class _QuietServer(uvicorn.Server):
    """Leaves signals to the frontend."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
