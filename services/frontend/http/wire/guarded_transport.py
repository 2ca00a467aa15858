"""The transport of one HTTP connection, closed in bounded time and memory."""

import asyncio
from typing import Any

LINGER_S = 2.0
"""Time for the client to read an early answer while its input is discarded."""
MIN_TAKEN_BYTES = 2**16
"""A client that reads less within the time limit for slow readers is disconnected."""
WRITER_GRACE_S = 1.0
"""Extra time for the request's own slow-reader timeout, which logs better."""


class GuardedTransport(asyncio.Transport):
    """Forwards writes, and ends the connection of a client that does not read or stop.

    Closing a socket with unread input resets the connection (RFC 9112, section 9.6). So only the
    write end is closed first, and input is discarded for a moment.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        slow_reader_timeout_s: float,
        max_discarded_bytes: int,
    ) -> None:
        """Guards `transport`."""
        super().__init__()
        self._transport = transport
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._max_discarded_bytes = max_discarded_bytes
        self._is_closing = False
        self._num_discarded_bytes = 0
        self._num_untaken_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_discarding = False
        """Whether input is discarded; set by the protocol and by closing."""
        self.has_input_left = False
        """Whether the client's request is incomplete; set by the protocol."""

    def write(self, data: Any) -> None:
        """Sends data, unless the connection is closing."""
        if not self._is_closing:
            self._transport.write(data)

    def discard(self, num_bytes: int) -> None:
        """Counts discarded input."""
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > self._max_discarded_bytes:
            self.abort()

    def close(self) -> None:
        """Ends the connection after the client has read the output, or a timeout."""
        if self._is_closing:
            return
        self._is_closing = self.is_discarding = True
        self._stop_timer()
        if not self.has_input_left:
            self._transport.close()
            self._check_later(self._slow_reader_timeout_s)
            return
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._check_later(LINGER_S)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._is_closing = self.is_discarding = True
        self._stop_timer()
        self._transport.abort()

    def expect_reader(self) -> None:
        """Aborts unless the client starts to read; the transport's buffer is full."""
        if not self._is_closing:
            self._check_later(self._slow_reader_timeout_s + WRITER_GRACE_S)

    def note_read(self) -> None:
        """Ends the wait for the client to read."""
        if not self._is_closing:
            self._stop_timer()

    def note_lost(self) -> None:
        """Releases everything after the connection is lost."""
        self._is_closing = self.is_discarding = True
        self._stop_timer()

    def is_closing(self) -> bool:
        """Whether the connection is closing."""
        return self._is_closing or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns a fact about the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Leaves input in the kernel, unless it is being discarded."""
        if not self.is_discarding:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads input again."""
        self._transport.resume_reading()

    def _check_later(self, seconds: float) -> None:
        self._stop_timer()
        self._num_untaken_bytes = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        untaken = self._transport.get_write_buffer_size()
        is_taken = self._num_untaken_bytes - untaken >= MIN_TAKEN_BYTES
        if untaken and is_taken:
            self._check_later(self._slow_reader_timeout_s)
        else:
            self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
