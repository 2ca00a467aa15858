"""Threads that encode and decode texts of medium length beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.transport.fair_turns import FairTurns

_Result = TypeVar("_Result")


class TokenizerThreads:
    """Threads whose queue is shared by accounts, so that one does not delay the others."""

    def __init__(self, num_threads: int) -> None:
        """Starts threads on first use."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._turns = FairTurns(num_threads)

    async def run(
        self,
        account: str,
        function: Callable[[], _Result],
        *,
        check: Callable[[], None] | None = None,
    ) -> _Result:
        """Runs a function in a thread, in a turn of the account, and returns its result.

        When the turn comes, `check` may refuse it by raising an error.
        """
        loop = asyncio.get_running_loop()

        def start() -> asyncio.Future[_Result]:
            if check is not None:
                check()
            return loop.run_in_executor(self._threads, function)

        return await self._turns.run(account, start)

    def close(self) -> None:
        """Takes no more work and drops waiting work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
