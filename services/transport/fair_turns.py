"""Turns at scarce work, which waiting callers get one after the other."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class FairTurns:
    """Lets a few pieces of work run at a time.

    While more wait, parties take turns: one with a thousand pieces delays another one's first piece
    by one of its own.
    """

    def __init__(self, num_turns: int) -> None:
        """Lets `num_turns` run at a time."""
        self._num_free = num_turns
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(
        self,
        party: str,
        start: Callable[[], Awaitable[_Result]],
        *,
        wait_s: float | None = None,
    ) -> _Result:
        """Starts work in a turn of the party and returns its result.

        A caller that is cancelled leaves the queue at once. Work that runs goes on without it and
        keeps its turn to its end.

        Raises:
            TimeoutError: the turn has not come within `wait_s`.
        """
        async with asyncio.timeout(wait_s):
            await self._take(party)
        try:
            work = asyncio.ensure_future(start())
        except BaseException:
            self._give_back()
            raise
        work.add_done_callback(self._end)
        try:
            return await asyncio.shield(work)
        finally:
            del work  # its error refers to this frame

    def num_waiting(self, party: str) -> int:
        """Returns how many pieces of a party's work wait."""
        return len(self._waiting.get(party, ()))

    async def _take(self, party: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(party, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                self._leave(party, turn)
            else:  # it came as the caller left
                self._give_back()
            raise

    def _leave(self, party: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(party)
        if queue is None or turn not in queue:
            return  # it was passed over
        queue.remove(turn)
        if not queue:
            del self._waiting[party]

    def _give_back(self) -> None:
        while self._waiting:
            party = next(iter(self._waiting))
            queue = self._waiting.pop(party)
            turn = queue.popleft()
            if queue:
                self._waiting[party] = queue  # now the last one
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _end(self, work: asyncio.Future[_Result]) -> None:
        self._give_back()
        if not work.cancelled():
            work.exception()  # the caller may be gone
