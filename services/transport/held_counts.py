"""Holds counts while a call runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.transport.counts import Counts
from services.transport.status import RefusedCallError, Status

RETRY_MS = 1000


@contextmanager
def holding(counts: Counts, *limits: tuple[str, int]) -> Iterator[None]:
    """Adds one to each of some counts and subtracts it afterwards.

    Args:
        counts: where they are counted.
        limits: each count's name, such as "sessions" or "sessions/alice", and its limit.

    Raises:
        RefusedCallError: one of them is at its limit.
    """
    taken: list[str] = []
    try:
        for name, limit in limits:
            if not counts.take(name, limit=limit):
                what, _, whose = name.partition("/")
                message = f"{limit} {what} are open{' for this caller' * bool(whose)}"
                raise RefusedCallError(
                    Status(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"{message}, which is the limit",
                        retry_after_ms=RETRY_MS,
                    )
                )
            taken.append(name)
        yield
    finally:
        for name in taken:
            counts.give_back(name)
