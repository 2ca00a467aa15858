"""Threads that encode and decode beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from services.frontend.errors import OverloadedError
from services.telemetry.counts import Counts, LocalCounts

LONG_CHARACTERS = 65_536
"""Longer texts, or prompts with more tokens, use the queue for long ones."""
MAX_LONG_TEXTS = 64
"""Limit of long texts that run or wait; a mebibyte takes a second or more."""
RETRY_AFTER_MS = 1000
_LONG = "long_texts"

_Result = TypeVar("_Result")


class TokenizerThreads:
    """Two thread pools, so that long texts do not delay short ones.

    The library releases the GIL: with 1 MiB of text another thread waits at most 20 ms.
    """

    def __init__(self, num_threads: int, counts: Counts | None = None) -> None:
        """Starts threads on first use."""
        self._short = _Lane("tokenizer", num_threads)
        self._long = _Lane("tokenizer-long", max(1, num_threads // 2))
        self._counts = counts or LocalCounts()

    async def run(self, size: int, function: Callable[[], _Result]) -> _Result:
        """Runs a function in a thread and returns its result.

        Raises:
            OverloadedError: too many long texts wait.
        """
        if size <= LONG_CHARACTERS:
            return await self._short.run(function)
        if not self._counts.take(_LONG, limit=MAX_LONG_TEXTS):
            raise OverloadedError(
                f"{MAX_LONG_TEXTS} long texts wait to be tokenized, which is the limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        try:
            return await self._long.run(function)
        finally:
            self._counts.give_back(_LONG)

    def close(self) -> None:
        """Takes no more work and drops waiting work."""
        self._short.close()
        self._long.close()


class _Lane:
    """Threads with a queue that callers leave at once when they give up."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns = asyncio.Semaphore(num_threads)

    async def run(self, function: Callable[[], _Result]) -> _Result:
        await self._turns.acquire()
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.release)

        try:
            work = self._threads.submit(function)
        except BaseException:
            self._turns.release()
            raise
        work.add_done_callback(release)  # a caller that gives up does not end the work
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
