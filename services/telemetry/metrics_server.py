"""The port that Prometheus asks: HTTP, with TLS where the service has it."""

import asyncio
import http.client
import io
import socket
import threading
from http import HTTPStatus

import structlog
from prometheus_client import CollectorRegistry

from services.telemetry.metrics_page import MetricsPage
from services.transport.connections import Connections, Place
from services.transport.counts import LocalCounts
from services.transport.hosts import AllowedHosts
from services.transport.listener import Listener
from services.transport.refused_calls import RefusedCalls, RefusedElsewhere
from services.transport.tls import ServerTls

CALLER_TIMEOUT_S = 10.0
"""Time that a caller has for its handshake, for its request, and for taking the answer, each."""
MAX_HEAD_BYTES = 16 * 2**10
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_PER_ADDRESS = 16

log = structlog.get_logger()


class MetricsServer:
    """Answers every GET with the figures, in a thread with an event loop of its own.

    Each connection has one answer.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        tls: ServerTls | None,
        hosts: AllowedHosts | None = None,
        refused: RefusedCalls | None = None,
    ) -> None:
        """Listens, and answers requests for some hosts; by default those of the address alone.

        Others count as `refused` in the running event loop.

        Raises:
            OSError: the address cannot be listened on.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family)
        self.port: int = self._listening.getsockname()[1]
        """Where it listens."""
        self._registry = registry
        self._hosts = hosts or AllowedHosts(host)
        self._refused = RefusedElsewhere(refused or RefusedCalls(LocalCounts()))
        self._tls = tls
        self._open: set[_Scrape] = set()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the port and every connection; not to be called in the event loop."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        page = MetricsPage(self._registry)
        listener = Listener(
            self._listening,
            Connections(
                LocalCounts(),
                "metrics/connections",
                limit=MAX_CONNECTIONS,
                limit_per_address=MAX_CONNECTIONS_PER_ADDRESS,
            ),
            lambda place: _Scrape(page, self._hosts, self._refused, place, self._open),
            tls=None if self._tls is None else self._tls.ssl_context(),
            handshake_timeout_s=CALLER_TIMEOUT_S,
        )
        listener.start()
        await self._stopping.wait()
        await listener.close()
        for scrape in list(self._open):
            scrape.abort()
        await asyncio.sleep(0)  # for connections to be lost


class _Scrape(asyncio.Protocol):
    """One connection: a request is read, answered, and that is all."""

    def __init__(
        self,
        page: MetricsPage,
        hosts: AllowedHosts,
        refused: RefusedElsewhere,
        place: Place,
        opened: set["_Scrape"],
    ) -> None:
        self._page = page
        self._hosts = hosts
        self._refused = refused
        self._place = place
        self._open = opened
        self._head = bytearray()
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a stream
        self._transport = transport
        self._open.add(self)
        self._place.wait(self.abort)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > MAX_HEAD_BYTES:
            self._timer.cancel()
            self._transport.pause_reading()
            self._place.work()
            self._answering = asyncio.create_task(self._answer(bytes(self._head)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._place.leave()
        self._open.discard(self)
        if self._answering is not None:
            self._answering.cancel()

    def abort(self) -> None:
        self._transport.abort()

    async def _answer(self, head: bytes) -> None:
        status, body, content_type = HTTPStatus.OK, b"", "text/plain; charset=utf-8"
        try:
            method, headers = _read_head(head)
            if method != b"GET":
                status = HTTPStatus.METHOD_NOT_ALLOWED
            elif not self._hosts.allow(headers.get("host")):
                status = HTTPStatus.FORBIDDEN
                self._refused.note_host(headers["host"], method="GET", peer=self._place.address)
            else:
                body, content_type = await self._page.render(headers.get("accept", ""))
        except http.client.HTTPException:
            status = HTTPStatus.BAD_REQUEST
        except Exception as error:  # noqa: BLE001  an edge: the scrape fails, and the log says why
            log.warning("metrics_not_collected", error=type(error).__name__)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        self._transport.write(
            f"HTTP/1.1 {status} {status.phrase}\r\n"
            f"content-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n".encode()
            + body
        )
        self._transport.close()
        self._place.wait(self.abort)
        self._start_timer()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CALLER_TIMEOUT_S, self.abort)


def _read_head(head: bytes) -> tuple[bytes, http.client.HTTPMessage]:
    """Returns the method of a request and its headers.

    Raises:
        HTTPException: it is no request, or its headers are too large or too many.
    """
    line, end, headers = head.partition(b"\r\n")
    if not end or b"\r\n\r\n" not in head:
        raise http.client.HTTPException
    return line.partition(b" ")[0], http.client.parse_headers(io.BytesIO(headers))
