"""Receives request bodies in bounded memory."""

import asyncio
from typing import Self

from starlette.requests import Request

from services.frontend.access.held_bytes import HeldBytes
from services.frontend.http.wire.content_encoding import decoder_of
from services.frontend.http.wire.status import RefusedCallError
from services.transport.counts import Counts

BODY_TIMEOUT_S = 30.0
"""Time limit to receive a body."""
MAX_BODIES = 16
"""Largest bodies in memory at a time, before they are parsed."""
MAX_BODIES_OF_ACCOUNT = 4
"""Limit per account: an API key, or a client address without keys."""


class Bodies:
    """Receives bodies and counts their bytes, in total and per account."""

    def __init__(self, counts: Counts, *, max_bytes: int) -> None:
        """Allows `max_bytes` per body."""
        self._max_bytes = max_bytes
        self._held = HeldBytes(
            counts,
            "http/body_bytes",
            "requests that are being received",
            limit=MAX_BODIES * max_bytes,
            limit_per_account=MAX_BODIES_OF_ACCOUNT * max_bytes,
        )

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
        self._held.take(account, num_bytes)

    def give_back(self, account: str, num_bytes: int) -> None:
        """Uncounts bytes."""
        self._held.give_back(account, num_bytes)


class Body:
    """A body in memory. Close it after parsing, or use it as a context manager."""

    def __init__(self, bodies: Bodies, account: str) -> None:
        self._bodies = bodies
        self._account = account
        # A list of parts: a growing buffer is copied repeatedly and fragments memory.
        self._parts: list[bytes] = []
        self.num_bytes = 0
        """Its bytes in memory."""

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
        self._bodies.take(self._account, len(part), size=self.num_bytes + len(part))
        self.num_bytes += len(part)
        self._parts.append(part)

    def close(self) -> None:
        """Frees the bytes; further calls do nothing."""
        self._bodies.give_back(self._account, self.num_bytes)
        self.num_bytes = 0
        self._parts.clear()


def _too_large(limit: int) -> RefusedCallError:
    return RefusedCallError(413, f"the body is over the limit of {limit} bytes")
