"""Slots for messages that are being received, so that unfinished ones take bounded memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from services.transport.counts import Counts
from services.transport.status import RefusedCallError, Status

MAX_WAITING = 4096
"""Calls that may wait for a slot. gRPC buffers up to 64 KiB of each meanwhile."""
MAX_WAITING_PER_PARTY = 1024
RETRY_S = 0.1
"""Time after which a call that still waits looks again for a message that takes too long."""


@dataclass(slots=True, eq=False)
class _Slot:
    party: str
    taken_s: float
    limit: asyncio.Timeout


class ReceiveSlots:
    """Bounds how many messages may be incomplete at a time.

    gRPC buffers a message, up to the largest that is allowed, from when it is read until it is
    complete. So a call takes a slot before it reads. While other calls wait, a slow message loses
    its slot, and the call with the fewest slots gets the next one: a caller that sends slowly does
    not keep others out.
    """

    def __init__(
        self, counts: Counts, name: str, *, max_slots: int, timeout_s: float, fair_s: float
    ) -> None:
        """Starts with all slots free.

        Args:
            counts: where slots are counted, as `name` and, for each party, `name/party`.
            name: the count's.
            max_slots: messages that may be incomplete at a time.
            timeout_s: longest that one may take.
            fair_s: longest that one may take while other calls wait for its slot.
        """
        self._counts = counts
        self._name = name
        self._max_slots = max_slots
        self._timeout_s = timeout_s
        self._fair_s = fair_s
        self._slots: set[_Slot] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_waiting = 0

    @asynccontextmanager
    async def hold(self, party: str) -> AsyncIterator[None]:
        """Holds a slot; what runs inside is cancelled when the slot is lost.

        Raises:
            RefusedCallError: too many calls wait already, or the slot was lost.
        """
        await self._take(party)
        limit = asyncio.timeout(self._timeout_s)
        slot = _Slot(party, asyncio.get_running_loop().time(), limit)
        self._slots.add(slot)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise RefusedCallError(
                Status(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the request did not arrive in {self._timeout_s:g} s"
                    f" ({self._fair_s:g} s while others wait)",
                )
            ) from None
        finally:
            self._slots.discard(slot)
            self._give_back(party)

    async def _take(self, party: str) -> None:
        if self._waiting or not self._counts.take(self._name, limit=self._max_slots):
            await self._wait(party)
        self._counts.take(f"{self._name}/{party}", limit=None)

    def _give_back(self, party: str) -> None:
        self._counts.give_back(f"{self._name}/{party}")
        self._counts.give_back(self._name)
        self._let_in()

    def _let_in(self) -> None:
        """Gives free slots to the waiting parties that hold the fewest."""
        while self._waiting and self._counts.take(self._name, limit=self._max_slots):
            party = min(self._waiting, key=self._num_held)
            turn = self._waiting[party].popleft()
            self._forget_if_empty(party)
            turn.set_result(None)

    def _num_held(self, party: str) -> int:
        return self._counts.held(f"{self._name}/{party}")

    async def _wait(self, party: str) -> None:
        queue = self._waiting.get(party, ())
        if self._num_waiting >= MAX_WAITING or len(queue) >= MAX_WAITING_PER_PARTY:
            raise RefusedCallError(
                Status(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._max_slots} requests are arriving and {self._num_waiting} wait",
                    retry_after_ms=1000,
                )
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(party, deque()).append(turn)
        self._num_waiting += 1
        try:
            self._let_in()
            while not turn.done():
                self._end_slowest()
                await asyncio.wait({turn}, timeout=RETRY_S)
        except BaseException:
            if turn.done():  # the slot was given to a call that is ending
                self._counts.give_back(self._name)
                self._let_in()
            else:
                self._waiting[party].remove(turn)
                self._forget_if_empty(party)
            raise
        finally:
            self._num_waiting -= 1

    def _forget_if_empty(self, party: str) -> None:
        if not self._waiting[party]:
            del self._waiting[party]

    def _end_slowest(self) -> None:
        """Ends the oldest message of the party with the most that take too long."""
        now_s = asyncio.get_running_loop().time()
        slow = [slot for slot in self._slots if now_s - slot.taken_s >= self._fair_s]
        if not slow:
            return
        slowest = max(slow, key=lambda slot: (self._num_held(slot.party), -slot.taken_s))
        self._slots.discard(slowest)  # the next one that waits ends another
        slowest.limit.reschedule(now_s)
