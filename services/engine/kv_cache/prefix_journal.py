"""Where changes of cached blocks are noted: for frontends that route by them, and as events."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice, repeat

from services.engine.kv_cache.block_events import BlockContent, BlockEvents, Tier, contents_of
from services.engine.request import Request

MAX_ENTRIES = 65536
"""Most changes kept; a reader that missed more starts over."""


@dataclass(frozen=True, slots=True)
class PrefixCursor:
    """A reader's position in a journal."""

    journal: "PrefixJournal"
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChanges:
    """Changes to the set of keys that a reader knows."""

    is_reset: bool = False
    """Whether the reader must forget all keys first."""
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cursor: PrefixCursor | None
    """Start of the next reading; None starts over."""


class PrefixJournal:
    """Keeps the last changes for any number of readers."""

    def __init__(self) -> None:
        self._entries: deque[tuple[bytes, bool]] = deque(maxlen=MAX_ENTRIES)
        self._num_recorded = 0

    def record(self, key: bytes, *, is_present: bool) -> None:
        """Records that a key was added or removed."""
        self._entries.append((key, is_present))
        self._num_recorded += 1

    def since(
        self, cursor: PrefixCursor | None, present: Collection[bytes], *, max_keys: int
    ) -> PrefixChanges:
        """Returns the changes after a cursor, or a reset with the youngest keys.

        Args:
            cursor: the reader's position; None, or another journal's, starts over.
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


class JointPrefixJournal(PrefixJournal):
    """The changes of several indexes: a key is present while one of them has it."""

    def __init__(self) -> None:
        super().__init__()
        self._num_holders: dict[bytes, int] = {}

    def record(self, key: bytes, *, is_present: bool) -> None:
        """Records that one of the indexes added or removed a key."""
        num_holders = self._num_holders.get(key, 0) + (1 if is_present else -1)
        self._num_holders[key] = num_holders
        if not num_holders:
            del self._num_holders[key]
        if num_holders == is_present:
            super().record(key, is_present=is_present)

    def since(
        self, cursor: PrefixCursor | None, present: Collection[bytes], *, max_keys: int
    ) -> PrefixChanges:
        """Returns the changes after a cursor; `present`, of one index, is left out of account."""
        del present
        return super().since(cursor, self._num_holders, max_keys=max_keys)


class BlockJournal:
    """Notes which blocks of a rank can be found; every tier's stores and removals come here."""

    def __init__(
        self, prefixes: PrefixJournal | None = None, events: BlockEvents | None = None
    ) -> None:
        """Starts with blocks of the GPU alone.

        Args:
            prefixes: takes the changes of keys, for frontends; by default one of its own. A joint
                one where several ranks or tiers may have a key.
            events: takes the events for subscribers; None without --kv-events.
        """
        self._prefixes = prefixes or PrefixJournal()
        self._events = events

    def contents(
        self, request: Request, first: int, last: int, block_size: int
    ) -> Iterable[BlockContent | None]:
        """Returns what subscribers may know of a request's blocks from `first` up to `last`.

        That is nothing if the request has a salt, if other weights began it, or if there are no
        subscribers.
        """
        is_special = request.cache_salt or request.first_weights_version is not None
        if self._events is None or is_special:
            return repeat(None)
        return contents_of(request, first, last, block_size)

    def stored(
        self, key: bytes, content: BlockContent | None = None, tier: Tier = Tier.GPU
    ) -> None:
        """Notes that a block can be found in a tier.

        A block that is copied from another tier has the content that it has there; one whose
        content is unknown makes no event.
        """
        self._prefixes.record(key, is_present=True)
        if self._events is not None:
            content = content or self._events.content_of(key)
            if content is not None:
                self._events.stored(key, content, tier)

    def removed(self, key: bytes, tier: Tier = Tier.GPU) -> None:
        """Notes that a block cannot be found in a tier any more."""
        self._prefixes.record(key, is_present=False)
        if self._events is not None:
            self._events.removed(key, tier)

    def since(
        self, cursor: PrefixCursor | None, present: Collection[bytes], *, max_keys: int
    ) -> PrefixChanges:
        """Returns the changes of keys after a cursor; see `PrefixJournal.since`."""
        return self._prefixes.since(cursor, present, max_keys=max_keys)
