"""What a connection may cost before it has made a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits that it lacks.

    Connections over their limit are closed at once, and so is one whose request line and headers
    do not come in time or are too large. `limited` sets the limits.
    """

    max_connections: int
    header_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Takes a connection, if there is room."""
        self._num_header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Reads what has come, and gives up on headers without end."""
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._header_timer is not None and self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Notes that a request has begun."""
        super().on_message_begin()
        if self._header_timer is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        """Begins to answer; uvicorn answers 400 to headers that are too large."""
        self._forget_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{size} bytes of headers; the limit is {MAX_HEADER_BYTES}")
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of everything."""
        self._forget_timer()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _forget_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def limited(*, max_connections: int, header_timeout_s: float) -> type[GuardedProtocol]:
    """Returns the protocol with its limits; uvicorn makes one for each connection."""
    attributes: dict[str, Any] = {
        "max_connections": max_connections,
        "header_timeout_s": header_timeout_s,
    }
    return type("LimitedProtocol", (GuardedProtocol,), attributes)
