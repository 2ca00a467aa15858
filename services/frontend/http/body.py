"""Reads the bodies of requests, which together take bounded memory."""

import asyncio
from typing import Self

from starlette.requests import Request

from services.frontend.errors import OverloadedError
from services.frontend.http.status import RefusedCallError
from services.telemetry.counts import Counts

BODY_TIMEOUT_S = 30.0
"""A body that takes longer to arrive is refused."""
MAX_BODIES = 16
"""Largest bodies that may be in memory at a time, being received or about to be parsed."""
MAX_BODIES_OF_ACCOUNT = 4
"""The same for one account: an API key or, where there are none, a client's address."""
RETRY_MS = 1000

_NAME = "http/body_bytes"


class Bodies:
    """Reads bodies and counts their bytes, in all and by account."""

    def __init__(self, counts: Counts, *, max_bytes: int) -> None:
        """Counts in `counts`; a body may have `max_bytes`."""
        self._counts = counts
        self._max_bytes = max_bytes

    async def read(self, request: Request, account: str) -> "Body":
        """Reads a body of JSON, whose bytes are `account`'s until it is closed.

        Raises:
            RefusedCallError: it is no JSON, is too large, or does not arrive.
            OverloadedError: bodies take too much memory.
            ClientDisconnect: the client went away.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # web pages can send other types to any address
            raise RefusedCallError(415, "the content type must be application/json")
        if int(request.headers.get("content-length", 0)) > self._max_bytes:  # the parser checks it
            raise _too_large(self._max_bytes)
        body = Body(self, account)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    body.append(part)
        except BaseException as error:
            body.close()
            if isinstance(error, TimeoutError):
                raise RefusedCallError(
                    408, f"the body did not come in {BODY_TIMEOUT_S} s"
                ) from None
            raise
        return body

    def take(self, account: str, num_bytes: int, *, size: int) -> None:
        """Counts more bytes of a body that has `size` with them.

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
        """Forgets bytes that were read."""
        self._counts.give_back(_NAME, num_bytes)
        self._counts.give_back(f"{_NAME}/{account}", num_bytes)


class Body:
    """A body in memory. Close it once it is parsed, or leave its block."""

    def __init__(self, bodies: Bodies, account: str) -> None:
        self._bodies = bodies
        self._account = account
        # Pieces, because a buffer that grows is copied again and again, and leaves holes behind.
        self._parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def content(self) -> bytes:
        """All that has come."""
        return b"".join(self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def append(self, part: bytes) -> None:
        """Adds what has come.

        Raises:
            RefusedCallError: the body is too large.
            OverloadedError: bodies take too much memory.
        """
        self._bodies.take(self._account, len(part), size=self._num_bytes + len(part))
        self._num_bytes += len(part)
        self._parts.append(part)

    def close(self) -> None:
        """Frees the bytes; a second time it does nothing."""
        self._bodies.give_back(self._account, self._num_bytes)
        self._num_bytes = 0
        self._parts.clear()


def _too_large(limit: int) -> RefusedCallError:
    return RefusedCallError(413, f"the body is over the limit of {limit} bytes")
