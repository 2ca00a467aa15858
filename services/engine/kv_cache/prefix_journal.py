"""What changed in a prefix index lately, for frontends that route by it."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

MAX_ENTRIES = 65536
"""Changes remembered. A reader that missed more than these starts anew."""


@dataclass(frozen=True, slots=True)
class PrefixCursor:
    """How far somebody has read."""

    journal: "PrefixJournal"
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChanges:
    """What a reader must do to know the keys that can be found."""

    is_reset: bool = False
    """True forgets all keys known before."""
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cursor: PrefixCursor | None
    """Where the next reading begins; None begins anew."""


class PrefixJournal:
    """Remembers the last changes; any number of readers follow at a pace of their own."""

    def __init__(self) -> None:
        self._entries: deque[tuple[bytes, bool]] = deque(maxlen=MAX_ENTRIES)
        self._num_recorded = 0

    def record(self, key: bytes, *, is_present: bool) -> None:
        """Notes that a key can be found now, or no more."""
        self._entries.append((key, is_present))
        self._num_recorded += 1

    def since(
        self, cursor: PrefixCursor | None, present: Collection[bytes], *, max_keys: int
    ) -> PrefixChanges:
        """Returns what changed behind a cursor, or a reset with the youngest keys.

        Args:
            cursor: where the reader is; None, or another journal's, starts anew.
            present: all keys that can be found, oldest first.
            max_keys: most keys returned.
        """
        now = PrefixCursor(self, self._num_recorded)
        is_known = cursor is not None and cursor.journal is self
        num_missed = self._num_recorded - cursor.position if cursor is not None else 0
        if not is_known or num_missed > min(len(self._entries), max_keys):
            youngest = tuple(islice(present, max(0, len(present) - max_keys), None))
            return PrefixChanges(is_reset=True, added=youngest, cursor=now)
        latest: dict[bytes, bool] = {}
        for key, is_present in islice(reversed(self._entries), num_missed):
            latest.setdefault(key, is_present)
        return PrefixChanges(
            added=tuple(key for key, is_present in latest.items() if is_present),
            removed=tuple(key for key, is_present in latest.items() if not is_present),
            cursor=now,
        )
