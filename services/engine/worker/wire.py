"""Messages over the socket pair between the engine service and a worker process.

A message is its length in four little-endian bytes, then its content: one serialized protobuf. The
worker blocks on its end (Channel); the service reads its end from an event loop (read_message).
"""

import asyncio
import select
import socket

MAX_MESSAGE_BYTES = 2**28
"""Largest message either side takes. A longer one means that the two have lost step."""

_LENGTH_BYTES = 4
_CHUNK_BYTES = 2**16


class WireError(Exception):
    """A message is longer than either side takes."""


def framed(content: bytes) -> bytes:
    """Puts the length in front of a message.

    Raises:
        WireError: the message is too long.
    """
    return _checked(len(content)).to_bytes(_LENGTH_BYTES, "little") + content


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Reads the next message.

    Raises:
        EOFError: the other side is gone.
        WireError: the message is too long.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        return await reader.readexactly(_checked(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other side closed the connection") from error


class Channel:
    """The blocking end of the connection. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()

    def send(self, content: bytes) -> None:
        """Sends one message.

        Raises:
            EOFError: the other side is gone.
            WireError: the message is too long.
        """
        try:
            self._socket.sendall(framed(content))
        except ConnectionError as error:
            raise EOFError("the other side closed the connection") from error

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next message; None when none is complete within `timeout_s`.

        Raises:
            EOFError: the other side is gone.
            WireError: the message is too long.
        """
        while True:
            content = self._take()
            if content is not None:
                return content
            if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            self._read()

    def close(self) -> None:
        """Closes the connection; the other side sees its end."""
        self._socket.close()

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except ConnectionError as error:
            raise EOFError("the other side closed the connection") from error
        if not chunk:
            raise EOFError("the other side closed the connection")
        self._received += chunk

    def _take(self) -> bytes | None:
        """Removes and returns the first complete message, if any."""
        if len(self._received) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + _checked(int.from_bytes(self._received[:_LENGTH_BYTES], "little"))
        if len(self._received) < end:
            return None
        content = bytes(self._received[_LENGTH_BYTES:end])
        del self._received[:end]
        return content


def _checked(length: int) -> int:
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message has {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return length
