"""Reads the answer to an HTTP request, within limits."""

from asyncio import StreamReader

import httptools

MAX_HEADER_BYTES = 2**16
_READ_BYTES = 2**16
_REDIRECTS = {301, 302, 303, 307, 308}


class ResponseError(Exception):
    """The answer cannot be used; the message says why."""


class Response:
    """An answer as far as it has come; `httptools` calls its `on_` methods."""

    def __init__(self, max_bytes: int) -> None:
        """Takes the most bytes of a body."""
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self._num_fed = 0
        self._has_headers = False
        self._is_complete = False

    async def read(self, stream: StreamReader) -> None:
        """Reads the answer to its end, or only its headers if it is a redirect.

        Raises:
            ResponseError: it has another status, is too long, encoded, cut off or no HTTP.
        """
        while not self._is_complete and self.location is None:
            content = await stream.read(_READ_BYTES)
            if not content:
                self._end()
                return
            self._num_fed += len(content)
            try:
                self._parser.feed_data(content)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                if not self._is_complete:
                    raise ResponseError("the server's answer is no HTTP") from None
            self._check()

    @property
    def location(self) -> str | None:
        """The URL that a redirect has; None if this is none."""
        if self._has_headers and self._parser.get_status_code() in _REDIRECTS:
            return self._headers.get(b"location", b"").decode("latin-1")
        return None

    @property
    def body(self) -> bytes:
        """The body."""
        return bytes(self._body)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header."""
        self._headers[name.lower()] = value.strip()

    def on_headers_complete(self) -> None:
        """Leaves interim answers, such as 103, out."""
        self._has_headers = self._parser.get_status_code() >= 200
        if not self._has_headers:
            self._headers.clear()

    def on_body(self, content: bytes) -> None:
        """Keeps a part of the body, up to the limit."""
        if len(self._body) <= self._max_bytes:
            self._body += content

    def on_message_complete(self) -> None:
        """Notes the end of the body."""
        self._is_complete = self._has_headers

    def _check(self) -> None:
        if not self._has_headers:
            if self._num_fed > MAX_HEADER_BYTES:
                raise ResponseError(f"the server's headers have over {MAX_HEADER_BYTES} bytes")
            return
        status = self._parser.get_status_code()
        if status not in {200, *_REDIRECTS}:
            raise ResponseError(f"the server answered with status {status}")
        if self._headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ResponseError("the server's answer is compressed")
        length = self._headers.get(b"content-length", b"0")
        if len(self._body) > self._max_bytes or int(length) > self._max_bytes:
            raise ResponseError(f"the image has over {self._max_bytes} bytes, which is the limit")

    def _end(self) -> None:
        """Accepts an answer whose end is the end of the connection."""
        has_length = {b"content-length", b"transfer-encoding"} & self._headers.keys()
        if not self._has_headers or has_length:
            raise ResponseError("the server's answer is cut off")
