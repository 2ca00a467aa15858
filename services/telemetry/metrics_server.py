"""The port that Prometheus asks: HTTP, with TLS where the service has it."""

import socket
import sys
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from services.telemetry.tls import ServerTls

CALLER_TIMEOUT_S = 10.0
"""A caller that says nothing for this long is hung up on."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers every GET with the figures, each connection in a thread of its own."""

    daemon_threads = True

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, tls: ServerTls | None
    ) -> None:
        """Listens.

        Raises:
            OSError: the address cannot be listened on.
        """
        [(self.address_family, *_), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._tls = tls
        HTTPServer.__init__(self, (host, port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def get_request(self) -> tuple[socket.socket, Any]:
        """Takes a connection; the handshake is left to its thread, which may wait for it."""
        connection, address = super().get_request()
        if self._tls is not None:
            connection = self._tls.current_context().wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of callers that go away, say nothing or speak no TLS."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = CALLER_TIMEOUT_S

    def log_message(self, *args: Any) -> None:
        """Says nothing of calls."""
