"""Receives request bodies in bounded memory."""

import asyncio
from typing import Self

from starlette.requests import Request

from services.frontend.errors import OverloadedError
from services.frontend.http.content_encoding import decoder_of
from services.frontend.http.status import RefusedCallError
from services.telemetry.counts import Counts

BODY_TIMEOUT_S = 30.0
"""Time limit to receive a body."""
MAX_BODIES = 16
"""Largest bodies in memory at a time, before they are parsed."""
MAX_BODIES_OF_ACCOUNT = 4
"""The same per account: an API key, or a client address without keys."""
RETRY_MS = 1000

_NAME = "http/body_bytes"


class Bodies:
    """Receives bodies and counts their bytes, in total and per account."""

    def __init__(self, counts: Counts, *, max_bytes: int) -> None:
        """Allows `max_bytes` per body."""
        self._counts = counts
        self._max_bytes = max_bytes

    async def read(self, request: Request, account: str) -> "Body":
        """Receives a JSON body, counted for `account` until it is closed.

        Raises:
            RefusedCallError: it is not JSON, cannot be decompressed, is too large, or does not
                arrive.
            OverloadedError: bodies take too much memory.
            ClientDisconnect: the client left.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # web pages can send other types cross-origin
            raise RefusedCallError(415, "the content type must be application/json")
        if (
            int(request.headers.get("content-length", 0)) > self._max_bytes
        ):  # the HTTP parser validates it
            raise _too_large(self._max_bytes)
        # Several headers are one list, and so refused.
        decoder = decoder_of(", ".join(request.headers.getlist("content-encoding")))
        body = Body(self, account)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    for number, piece in enumerate(decoder.decode(part)):
                        if number:  # a part may hold a thousand times its size
                            await asyncio.sleep(0)
                        body.append(piece)
                decoder.finish()
        except BaseException as error:
            body.close()
            if isinstance(error, TimeoutError):
                raise RefusedCallError(
                    408, f"the body did not come in {BODY_TIMEOUT_S} s"
                ) from None
            raise
        return body

    def take(self, account: str, num_bytes: int, *, size: int) -> None:
        """Counts new bytes of a body that now has `size`.

        Raises:
            RefusedCallError: the body is too large.
            OverloadedError: bodies take too much memory.
        """
        if size > self._max_bytes:
            raise _too_large(self._max_bytes)
        own, own_limit = f"{_NAME}/{account}", MAX_BODIES_OF_ACCOUNT * self._max_bytes
        if not self._counts.take(own, num_bytes, limit=own_limit):
            raise OverloadedError(
                f"your requests that are being received have {self._counts.held(own)} bytes; the"
                f" limit is {own_limit}",
                retry_after_ms=RETRY_MS,
            )
        limit = MAX_BODIES * self._max_bytes
        if not self._counts.take(_NAME, num_bytes, limit=limit):
            self._counts.give_back(own, num_bytes)
            raise OverloadedError(
                f"requests that are being received have {self._counts.held(_NAME)} bytes; the limit"
                f" is {limit}",
                retry_after_ms=RETRY_MS,
            )

    def give_back(self, account: str, num_bytes: int) -> None:
        """Uncounts bytes."""
        self._counts.give_back(_NAME, num_bytes)
        self._counts.give_back(f"{_NAME}/{account}", num_bytes)


class Body:
    """A body in memory. Close it after parsing, or use it as a context manager."""

    def __init__(self, bodies: Bodies, account: str) -> None:
        self._bodies = bodies
        self._account = account
        # A list of parts: a growing buffer is copied repeatedly and fragments memory.
        self._parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def content(self) -> bytes:
        """The bytes received so far."""
        return b"".join(self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def append(self, part: bytes) -> None:
        """Appends received bytes.

        Raises:
            RefusedCallError: the body is too large.
            OverloadedError: bodies take too much memory.
        """
        self._bodies.take(self._account, len(part), size=self._num_bytes + len(part))
        self._num_bytes += len(part)
        self._parts.append(part)

    def close(self) -> None:
        """Frees the bytes; further calls do nothing."""
        self._bodies.give_back(self._account, self._num_bytes)
        self._num_bytes = 0
        self._parts.clear()


def _too_large(limit: int) -> RefusedCallError:
    return RefusedCallError(413, f"the body is over the limit of {limit} bytes")
