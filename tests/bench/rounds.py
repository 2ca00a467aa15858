"""Rounds of programs that work for a time, however slow the machine."""

import time
from collections.abc import Iterator


def rounds(end_s: float) -> Iterator[None]:
    """Yields until a time of time.monotonic(), at least once."""
    yield
    while time.monotonic() < end_s:
        yield
