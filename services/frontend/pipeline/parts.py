"""Processes long sequences on the event loop in parts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

PART_ITEMS = 32_768
"""Items processed without a break, about 3 ms at 0.1 us each."""

_Item = TypeVar("_Item")


async def in_parts(items: Sequence[_Item]) -> AsyncIterator[Sequence[_Item]]:
    """Yields a sequence in slices, and lets other tasks run between them."""
    for start in range(0, len(items), PART_ITEMS):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + PART_ITEMS]
