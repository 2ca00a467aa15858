"""Waits for a condition, without a guess at how long it takes."""

import asyncio
from collections.abc import Callable


async def until(
    condition: Callable[[], object], *, timeout_s: float = 60, pause_s: float = 0.002
) -> None:
    """Returns once `condition()` holds; TimeoutError when it does not in time.

    pause_s: from one look to the next; longer where a look costs much.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  many conditions have no event
            await asyncio.sleep(pause_s)
