"""Figures of the adapters and of the requests that name them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.engine.request import Request, RequestStatus

MOST_NAMES = 64
"""Most adapters with figures of their own: names are labels, and callers choose among thousands."""


@dataclass(slots=True)
class ReadCounts:
    """Adapters that workers read into the host's memory, and the seconds that it took."""

    num_read: int = 0
    read_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFigures:
    """The present state of the adapters, and counts since the start.

    running, waiting: requests by the name of their adapter, of at most MOST_NAMES names.
    """

    num_slots: int
    num_known: int
    num_resident: int
    num_read: int
    read_s: float
    num_waiting_for_slot: int
    running: Mapping[str, int]
    waiting: Mapping[str, int]

    @classmethod
    def of(
        cls,
        requests: Iterable[Request],
        resident: frozenset[bytes],
        counts: ReadCounts,
        *,
        num_slots: int,
        num_known: int,
    ) -> "AdapterFigures":
        """Returns the figures of live requests and of the adapters in slots."""
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        num_waiting_for_slot = 0
        for request in requests:
            if request.adapter is None:
                continue
            is_running = request.status is RequestStatus.RUNNING
            (running if is_running else waiting)[request.adapter.name] += 1
            num_waiting_for_slot += not is_running and request.adapter.digest not in resident
        return cls(
            num_slots=num_slots,
            num_known=num_known,
            num_resident=len(resident),
            num_read=counts.num_read,
            read_s=counts.read_s,
            num_waiting_for_slot=num_waiting_for_slot,
            running=dict(running.most_common(MOST_NAMES)),
            waiting=dict(waiting.most_common(MOST_NAMES)),
        )
