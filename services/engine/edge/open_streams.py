"""Limits streams with large output, and the time of each write."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.engine.errors import QueueFullError, SlowReaderError
from services.transport.callers import by_address
from services.transport.counts import Counts

RETRY_MS = 1000

TOKENIZER = "tokenizer_streams"
WATCH = "watch_streams"
KV_EVENTS = "kv_event_streams"
MAX_STREAMS = {TOKENIZER: 64, WATCH: 32, KV_EVENTS: 64}
"""Open streams by kind: an unread TOKENIZER holds 0.5 MB, a WATCH costs a message per step, unread
KV_EVENTS hold a list of all cached blocks."""
PARTS_PER_ADDRESS = 4
"""Divides these limits; one address may have one part."""


class OpenStreams:
    """Counts open streams by kind, in total and per address."""

    def __init__(self, counts: Counts) -> None:
        """Counts in `counts`."""
        self._counts = counts

    @contextmanager
    def hold(self, kind: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Counts a stream while it is open.

        Raises:
            QueueFullError: too many are open, in total or from the caller's address.
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
    """Writes a message within a time limit; flow control blocks while the caller reads nothing.

    Raises:
        SlowReaderError: it took too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError:
        raise SlowReaderError(f"output lay unread for {timeout_s} s") from None
