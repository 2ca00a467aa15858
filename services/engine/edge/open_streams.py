"""Bounds the streams that send much for a small request, and the time that each write may take."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.engine.errors import QueueFullError, SlowReaderError
from services.telemetry.callers import by_address
from services.telemetry.counts import Counts

RETRY_MS = 1000

TOKENIZER = "tokenizer_streams"
WATCH = "watch_streams"
MAX_STREAMS = {TOKENIZER: 64, WATCH: 32}
"""Streams of a kind that are open at a time. One of TOKENIZER that nobody reads holds half a
megabyte; each of WATCH costs every step some microseconds and its message."""
PARTS_PER_ADDRESS = 4
"""Divisor of these limits: the part that one address may have."""


class OpenStreams:
    """Counts open streams by kind, in all and for each address."""

    def __init__(self, counts: Counts) -> None:
        """Takes over the counts that it compares with its limits."""
        self._counts = counts

    @contextmanager
    def hold(self, kind: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Counts a stream while it is open.

        Args:
            kind: TOKENIZER or WATCH.
            context: the stream's call.

        Raises:
            QueueFullError: too many are open, in all or at the caller's address.
        """
        limit = MAX_STREAMS[kind]
        limits = {f"{kind}/{by_address(context)}": limit // PARTS_PER_ADDRESS, kind: limit}
        taken = []
        try:
            for name, most in limits.items():
                if not self._counts.take(name, limit=most):
                    whose = "" if name == kind else " of this address"
                    raise QueueFullError(
                        f"{most} {kind.replace('_', ' ')}{whose} are open, which is the limit",
                        retry_after_ms=RETRY_MS,
                    )
                taken.append(name)
            yield
        finally:
            for name in taken:
                self._counts.give_back(name)


async def write_in_time(
    context: "grpc.aio.ServicerContext[Any, Any]", message: Any, timeout_s: float
) -> None:
    """Writes a message of a stream; flow control holds it up while the caller reads nothing.

    Raises:
        SlowReaderError: it took too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError:
        raise SlowReaderError(f"output lay unread for {timeout_s} s") from None
