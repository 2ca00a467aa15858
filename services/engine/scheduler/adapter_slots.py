"""Slots of the device's memory for adapters of running requests."""

from collections import OrderedDict
from collections.abc import Mapping

from services.engine.adapter import Adapter
from services.engine.scheduler.stats import SchedulerCounts


class AdapterSlots:
    """Which adapter each slot holds, and how many running requests use it.

    Data-parallel ranks that compute each other's tokens have the same slots.

    An adapter stays in its slot after its last request, until another one needs the slot: the one
    that was used least recently leaves first.
    """

    def __init__(self, num_slots: int, counts: SchedulerCounts) -> None:
        """Starts with empty slots; `counts` takes the loads."""
        self._counts = counts
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[bytes, int] = {}
        self._num_users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._loads: list[tuple[int, bytes]] = []
        self._claim: bytes | None = None
        self._next_claim: bytes | None = None

    @property
    def by_digest(self) -> Mapping[bytes, int]:
        """The slot of each adapter that has one."""
        return self._slots

    @property
    def are_used(self) -> bool:
        """Whether a running request has an adapter."""
        return bool(self._num_users)

    def begin_step(self) -> None:
        """Lets the adapter that first found no slot in the last step go before all others in this.

        Ranks that share slots need it: those of one rank that wait hold up only its own requests.
        """
        self._claim, self._next_claim = self._next_claim, None

    @property
    def is_claim_dropped(self) -> bool:
        """Whether an adapter went first in this step that no request has asked for again."""
        return self._claim is not None and self._next_claim is None

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether a request of an adapter can run in the next step."""
        if adapter is None:
            return True
        digest = adapter.digest
        if self._claim not in (None, digest):
            return False
        if digest in self._slots or self._free or self._idle:
            return True
        self._next_claim = self._next_claim or digest
        return False

    def take(self, adapter: Adapter | None) -> int:
        """Counts a request that starts; returns one more than its slot, 0 without an adapter.

        There is room. The next step must load what `take_loads` returns.
        """
        if adapter is None:
            return 0
        digest = adapter.digest
        slot = self._slots.get(digest)
        if slot is None:
            slot = self._free_slot()
            self._slots[digest] = slot
            self._loads.append((slot, digest))
            self._counts.num_adapter_loads += 1
        self._idle.pop(digest, None)
        self._num_users[digest] = self._num_users.get(digest, 0) + 1
        return slot + 1

    def slot_of(self, adapter: Adapter | None) -> int:
        """Returns one more than the slot of a running request's adapter, 0 without one."""
        return 0 if adapter is None else self._slots[adapter.digest] + 1

    def release(self, adapter: Adapter | None) -> None:
        """Counts a request that ends or is preempted."""
        if adapter is None:
            return
        digest = adapter.digest
        self._num_users[digest] -= 1
        if not self._num_users[digest]:
            del self._num_users[digest]
            self._idle[digest] = None

    def take_loads(self) -> list[tuple[int, bytes]]:
        """Returns slots and the adapters to load into them, for the next step."""
        loads, self._loads = self._loads, []
        return loads

    def forget(self) -> None:
        """Empties all slots, as steps that filled some were not computed; keeps them in use.

        Of ranks that share slots each calls it, the last when no request runs.
        """
        if self._num_users:
            return
        self._free += self._slots.values()
        self._slots.clear()
        self._idle.clear()
        self._loads.clear()

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        digest, _ = self._idle.popitem(last=False)
        self._counts.num_adapter_evictions += 1
        return self._slots.pop(digest)
