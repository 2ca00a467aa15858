"""The load and the cached prefixes of one engine."""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.engine.v1.engine_pb2 import Heartbeat, KnownAdapter
from services.frontend.engine_client.prefix_keys import read_keys

MAX_KNOWN_PREFIXES = 2**20
"""Keys remembered per engine, 64 MiB of memory; further prefixes count as not cached."""
STALLED_STEP_MS = 2000
"""An engine with a longer step gets a request only if no other engine can."""


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter that an engine has loaded, or None after it was removed.

    num_changes: of the engine's adapters, with this one; 0 of an engine that does not count them.
    """

    name: str
    adapter: KnownAdapter | None
    num_changes: int


class EngineView:
    """The state in the engine's last heartbeat, corrected by the requests sent since."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.adapters: dict[str, KnownAdapter] = {}
        """Adapters of the engine, by name."""
        self.lists_adapters = False
        """Whether these are all; an engine that has not started yet has none to list."""
        self._num_listed = 0
        """Changes of adapters that were part of the last list."""
        self._noted: dict[str, AdapterChange] = {}
        """Later changes, by name."""
        self._known: set[int] = set()
        self._expected: set[int] = set()
        self._expected_before: set[int] = set()
        self._num_waiting_blocks = 0.0
        self.num_sent_blocks = 0
        """Blocks to compute of the requests sent since the last heartbeat."""
        self.num_sent_requests = 0
        """Requests sent since the last heartbeat."""

    @property
    def is_stalled(self) -> bool:
        """Whether its current step takes suspiciously long."""
        return self.heartbeat.step_age_ms > STALLED_STEP_MS

    @property
    def num_known_prefixes(self) -> int:
        """Prefix keys that the engine reported and has not removed."""
        return len(self._known)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self.heartbeat.num_used_blocks

    @property
    def num_recent_tokens(self) -> int | None:
        """Tokens computed lately by the last heartbeat; None if that does not say."""
        heartbeat = self.heartbeat
        return heartbeat.num_recent_tokens if heartbeat.HasField("num_recent_tokens") else None

    @property
    def num_requests(self) -> int:
        """Requests that run or wait there, or were sent since the last heartbeat."""
        return self.heartbeat.num_running + self.heartbeat.num_waiting + self.num_sent_requests

    @property
    def num_queued_blocks(self) -> float:
        """An estimate of the blocks of waiting requests and of newly sent ones."""
        return self._num_waiting_blocks + self.num_sent_blocks

    def take(self, heartbeat: Heartbeat) -> None:
        """Applies a heartbeat."""
        self.heartbeat = heartbeat
        mean_blocks = max(1.0, heartbeat.num_used_blocks / max(1, heartbeat.num_running))
        self._num_waiting_blocks = heartbeat.num_waiting * mean_blocks
        self.num_sent_blocks = self.num_sent_requests = 0
        # A heartbeat may miss a request sent just before it; the next one includes it.
        self._expected_before, self._expected = self._expected, set()
        self.lists_adapters |= heartbeat.ready or heartbeat.asleep
        known = heartbeat.adapters
        if heartbeat.HasField("adapters"):
            self.adapters = {each.name: each for each in known.adapters}
            self._num_listed = known.num_changes
            # One that was on its way during an operator's change says nothing of that.
            noted, self._noted = self._noted, {}
            for change in noted.values():
                if change.num_changes > known.num_changes:
                    self.note(change)
        changes = heartbeat.prefixes
        if changes.reset:
            self._known.clear()
        self._known.difference_update(read_keys(changes.removed))
        if len(self._known) < MAX_KNOWN_PREFIXES:
            self._known.update(read_keys(changes.added))

    def note(self, change: AdapterChange) -> None:
        """Notes the answer to an operator's change before a heartbeat includes it."""
        earlier = self._noted.get(change.name)
        known = self._num_listed if earlier is None else earlier.num_changes
        if 0 < change.num_changes <= known:
            return
        self._noted[change.name] = change
        if change.adapter is None:
            self.adapters.pop(change.name, None)
        else:
            self.adapters[change.name] = change.adapter

    def has_adapter(self, name: str, digest: bytes) -> bool:
        """Whether the engine has an adapter of this name and content."""
        known = self.adapters.get(name)
        return known is not None and known.digest == digest

    def expect(self, keys: Iterable[int], *, num_blocks: int) -> None:
        """Notes a sent request before a heartbeat includes it."""
        self.num_sent_blocks += num_blocks
        self.num_sent_requests += 1
        self._expected.update(keys)

    def count_cached(self, keys: Iterable[int]) -> int:
        """Returns how many leading blocks of a prompt the engine should have cached."""
        count = 0
        for key in keys:
            if not (key in self._known or key in self._expected or key in self._expected_before):
                break
            count += 1
        return count
