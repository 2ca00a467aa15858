"""uvicorn's HTTP protocol with limits on bytes and times."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.frontend.http.wire.body import BODY_TIMEOUT_S
from services.frontend.http.wire.guarded_transport import GuardedTransport
from services.transport.connections import Place

MAX_HEADER_BYTES = 64 * 2**10
"""Limit of a request's bytes outside its body: request line, headers, framing, trailers."""
MAX_HEADERS = 128
KEEP_ALIVE_S = 5.0
"""Idle time after which a connection is closed."""
_BODY_GRACE_S = 5.0
"""Extra time for the application to answer a late body itself."""
_BODY_GRACE_BYTES = 2**20
"""Bytes over the limit that may arrive before the application refuses the body."""
_SLICE_BYTES = 2**14
"""Input is parsed in slices of this size, with checks between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection."""

    header_timeout_s: float
    """Time limit of the request line and headers, and of a new connection's first byte."""
    slow_reader_timeout_s: float
    """A client that reads nothing for this long is disconnected."""
    max_body_bytes: int


class GuardedProtocol(HttpToolsProtocol):
    """Serves one connection, one request at a time.

    Bytes outside the body are limited to `MAX_HEADER_BYTES` plus the size of the body, and each
    phase has a time limit. Input during an answer is discarded and the connection then ends.
    """

    transport: GuardedTransport

    def __init__(
        self, config: Config, state: ServerState, limits: ConnectionLimits, place: Place
    ) -> None:
        """Serves the application of `config`; frees `place` when the connection is lost."""
        super().__init__(config=config, server_state=state, app_state={})
        self._limits = limits
        self._place = place
        self._timer: asyncio.TimerHandle | None = None
        self._num_other_bytes = 0
        self._num_body_bytes = 0
        self._is_head_read = False
        self._application = self.app
        self.app = self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Waits for a request."""
        if transport.get_extra_info("ssl_object") is not None:
            # Unread input waits in the kernel, not here.
            transport.set_read_buffer_limits(high=_SLICE_BYTES)  # type: ignore[attr-defined]  # of TLS
        guarded = GuardedTransport(
            transport,
            slow_reader_timeout_s=self._limits.slow_reader_timeout_s,
            max_discarded_bytes=self._limits.max_body_bytes,
        )
        super().connection_made(guarded)
        self._await_request(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Releases everything."""
        self._stop_timer()
        self.transport.note_lost()
        self._place.leave()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Treats the end of input as a disconnect, as uvicorn does."""
        self.transport.has_input_left = False
        self._close()
        self._end_cycle()

    def data_received(self, data: bytes) -> None:
        """Parses input in slices while it is wanted."""
        view = memoryview(data)
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_discarding:
                self.transport.discard(len(data) - start)
                return
            self._parse(view[start : start + _SLICE_BYTES])

    def pause_writing(self) -> None:
        """Gives the client time to read."""
        super().pause_writing()
        self.transport.expect_reader()

    def resume_writing(self) -> None:
        """Continues writing."""
        super().resume_writing()
        self.transport.note_read()

    def shutdown(self) -> None:
        """Closes the connection after the current answer."""
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self._close()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begins a request."""
        if self._is_answering:
            raise _PipelinedError
        super().on_message_begin()
        self._is_head_read = False
        self.transport.has_input_left = True
        self._start_timer(
            self._limits.header_timeout_s, lambda: self._refuse(408, "the headers took too long")
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; ignores trailers."""
        if self._is_head_read:
            return
        if len(self.headers) == MAX_HEADERS:
            raise _RefusedError(431, f"there are over {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the answer."""
        self._check_head()
        self._is_head_read = True
        self._place.work()
        self._start_timer(
            BODY_TIMEOUT_S + _BODY_GRACE_S, lambda: self._refuse(408, "the body took too long")
        )
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes part of the body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Notes that the request is complete."""
        self._stop_timer()
        self.transport.has_input_left = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Waits for another request, unless the connection must end."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._begin_closing()
        else:
            self.flow.resume_reading()
            self._await_request(KEEP_ALIVE_S)

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application; an early answer announces the end of the connection.

        The answer to HTTP/1.0 has no chunks, which that does not know: it ends with the connection.
        """
        has_no_chunks = scope["http_version"] == "1.0"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
                if self.transport.has_input_left:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
                if has_no_chunks:
                    self.cycle.chunked_encoding = False
            elif has_no_chunks:
                # uvicorn would count down from a length that may be unknown.
                self.cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._application(scope, receive, send_guarded)

    def _parse(self, data: memoryview) -> None:
        self._num_other_bytes += len(data)
        num_body_bytes = self._num_body_bytes
        try:
            self.parser.feed_data(data)
            self._num_other_bytes -= self._num_body_bytes - num_body_bytes
            self._check_sizes()
        except httptools.HttpParserUpgrade:  # the rest is not HTTP
            self._discard_input()
        except httptools.HttpParserCallbackError as error:
            self._take_refusal(error.__context__)
        except (httptools.HttpParserError, _RefusedError) as error:
            self._take_refusal(error)

    def _check_head(self) -> None:
        """Refuses heads that a proxy may read in another way (RFC 9112, sections 3.2 and 6.1)."""
        is_1_0 = self.parser.get_http_version() == "1.0"
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts != 1 and not (is_1_0 and num_hosts == 0):
            raise _RefusedError(400, "there must be one Host")
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if encodings and (is_1_0 or [value.lower() for value in encodings] != [b"chunked"]):
            raise _RefusedError(400, "the only Transfer-Encoding is chunked, in HTTP/1.1")

    def _check_sizes(self) -> None:
        if self._num_other_bytes > MAX_HEADER_BYTES + self._num_body_bytes:
            raise _RefusedError(
                431, f"request line, headers and framing are over {MAX_HEADER_BYTES} bytes"
            )
        if self._num_body_bytes > self._limits.max_body_bytes + _BODY_GRACE_BYTES:
            raise _RefusedError(413, f"the body is over {self._limits.max_body_bytes} bytes")

    def _take_refusal(self, error: BaseException | None) -> None:
        if isinstance(error, _PipelinedError):
            self._discard_input()
        elif isinstance(error, _RefusedError):
            self._refuse(error.status, str(error))
        else:
            self._refuse(400, "the request is not HTTP/1.1")

    def _discard_input(self) -> None:
        """Ends the connection after the current answer."""
        self.transport.is_discarding = self.transport.has_input_left = True
        self.flow.resume_reading()  # to notice a disconnect
        self.shutdown()

    def _refuse(self, status: int, message: str) -> None:
        """Answers for the application, unless it has begun, and ends the connection."""
        if self._is_answering and self.cycle.response_started:
            self.transport.abort()
        else:
            self.transport.has_input_left = True
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                "content-type: text/plain; charset=utf-8\r\n"
                f"content-length: {len(message)}\r\n"
                "connection: close\r\n\r\n"
                f"{message}".encode()
            )
            self._close()
        self._end_cycle()

    def _end_cycle(self) -> None:
        """Reports a disconnect to the application."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.flow.resume_writing()

    def _await_request(self, timeout_s: float) -> None:
        self._num_other_bytes = self._num_body_bytes = 0
        self._place.wait(self.transport.abort)
        self._start_timer(timeout_s, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._begin_closing()

    def _begin_closing(self) -> None:
        self._stop_timer()
        self._place.wait(self.transport.abort)

    def _start_timer(self, seconds: float, callback: Callable[[], Any]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _RefusedError(Exception):
    """Input that ends the connection."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _PipelinedError(Exception):
    """A request arrived before the previous one was answered."""
