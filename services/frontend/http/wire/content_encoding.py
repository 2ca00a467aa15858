"""Decompresses request bodies, within their limit."""

import zlib
from collections.abc import Iterator
from typing import Protocol

from services.frontend.http.wire.status import RefusedCallError

PIECE_BYTES = 2**17
"""Decompressed bytes at a time, about 0.2 ms."""
ENCODINGS = ("gzip", "deflate")
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_WINDOWS = {"gzip": _GZIP_WINDOW, "x-gzip": _GZIP_WINDOW, "deflate": zlib.MAX_WBITS}
"""zlib's names of the forms of RFC 9110, section 8.4.1; deflate has a header of zlib."""


class Decoder(Protocol):
    """Decodes the parts of one body."""

    def decode(self, part: bytes) -> Iterator[bytes]:
        """Yields the content of a part, in pieces of at most PIECE_BYTES."""

    def finish(self) -> None:
        """Ends the body."""


def decoder_of(encoding: str) -> Decoder:
    """Returns the decoder for a Content-Encoding; an empty one means none.

    Raises:
        RefusedCallError: the encoding is not supported.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return _Plain()
    if name not in _WINDOWS:
        raise RefusedCallError(
            415, f"the content encoding {name[:32]!r} is not supported; gzip and deflate are"
        )
    return _Inflater(name, _WINDOWS[name])


class _Plain:
    """Passes parts on."""

    def decode(self, part: bytes) -> Iterator[bytes]:
        """Yields the part."""
        yield part

    def finish(self) -> None:
        """Does nothing: any content is whole."""


class _Inflater:
    """Decompresses one stream."""

    def __init__(self, name: str, window: int) -> None:
        self._name = name
        self._stream = zlib.decompressobj(window)

    def decode(self, part: bytes) -> Iterator[bytes]:
        """Yields the content of a part.

        Raises:
            RefusedCallError: the part is not compressed so, or follows the end.
        """
        rest, piece = part, b""
        # A full piece may leave output in the stream when all input is read.
        while rest or len(piece) == PIECE_BYTES:
            if self._stream.eof:
                raise RefusedCallError(400, f"the body goes on after the end of its {self._name}")
            try:
                piece = self._stream.decompress(rest, PIECE_BYTES)
            except zlib.error:
                raise RefusedCallError(400, f"the body is not {self._name}") from None
            rest = self._stream.unconsumed_tail or self._stream.unused_data
            if piece:
                yield piece
            if self._stream.eof and not rest:
                return

    def finish(self) -> None:
        """Ends the body.

        Raises:
            RefusedCallError: the stream is incomplete.
        """
        if not self._stream.eof:
            raise RefusedCallError(400, f"the body ends before its {self._name} does")
