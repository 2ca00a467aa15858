"""HTTP/2 by hand, for frames that no well-behaved client sends."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ssl import SSLContext

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 2, 3, 4, 6, 7
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NOT_INDEXED, INDEXED = b"\x00", b"\x40"
FIRST_DYNAMIC_ENTRY = b"\xbe"
"""Refers to the header that was added to the table last."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Returns one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + _uint32(stream_id) + payload


def header(name: str, value: str, how: bytes = NOT_INDEXED) -> bytes:
    """Returns one header, spelled out; INDEXED adds it to the peer's table."""
    return how + _string(name.encode()) + _string(value.encode())


def call_headers(path: str, **metadata: str) -> bytes:
    """Returns the headers of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "content-type": "application/grpc",
        **metadata,
    }
    return b"".join(header(name, value) for name, value in fields.items())


def message_start(size: int, content: bytes) -> bytes:
    """Returns the prefix of a gRPC message of `size` bytes, and its first bytes."""
    return b"\x00" + _uint32(size) + content


class RawConnection:
    """One connection that acknowledges settings, answers pings and sends the given frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ended: set[int] = set()

    def send(self, *frames: bytes) -> None:
        """Sends frames."""
        self._writer.write(b"".join(frames))

    async def drain(self) -> None:
        """Waits until the peer has taken nearly all that was sent.

        Raises:
            ConnectionError: the peer closed the connection.
        """
        await self._writer.drain()

    async def ended_stream(self) -> int:
        """Returns the next stream that the peer ends, each once.

        Raises:
            IncompleteReadError, ConnectionError: the peer closed the connection.
        """
        while True:
            kind, flags, stream_id, payload = await self._read()
            if kind == SETTINGS and not flags & ACK:
                self.send(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.send(frame(PING, ACK, 0, payload))
            elif kind == GOAWAY:
                raise ConnectionResetError(payload[8:].decode(errors="replace"))
            elif stream_id not in self._ended and (
                kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)
            ):
                self._ended.add(stream_id)
                return stream_id

    async def _read(self) -> tuple[int, int, int, bytes]:
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, payload


@asynccontextmanager
async def raw_connection(
    address: str, ssl: SSLContext | None = None
) -> AsyncIterator[RawConnection]:
    """Connects and sends the preface and empty settings."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=ssl)
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()


def _uint32(value: int) -> bytes:
    return struct.pack(">I", value)


def _string(text: bytes) -> bytes:
    """Returns an HPACK string: 7 bits of length, more bytes of it as they are needed."""
    length = len(text)
    if length < 127:
        return bytes([length]) + text
    encoded, length = b"\x7f", length - 127
    while length >= 128:
        encoded, length = encoded + bytes([length % 128 + 128]), length // 128
    return encoded + bytes([length]) + text
