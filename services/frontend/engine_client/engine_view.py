"""What a session knows of its engine: how busy it is, and which prefixes it has cached."""

from collections.abc import Iterable

from protos.engine.v1.engine_pb2 import Heartbeat
from services.frontend.engine_client.prefix_keys import read_keys

MAX_KNOWN_PREFIXES = 2**20
"""Keys remembered of one engine, 64 MiB of memory; prefixes beyond them count as not cached."""
STALLED_STEP_MS = 2000
"""An engine whose step takes longer is given requests only where no other takes them."""


class EngineView:
    """An engine as its heartbeats describe it, corrected by what it was sent since the last one."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self._known: set[int] = set()
        self._expected: set[int] = set()
        self._expected_before: set[int] = set()
        self._num_sent_blocks = 0

    @property
    def is_stalled(self) -> bool:
        """Whether its step takes suspiciously long."""
        return self.heartbeat.step_age_ms > STALLED_STEP_MS

    @property
    def num_known_prefixes(self) -> int:
        """Keys that it has reported and not taken back."""
        return len(self._known)

    @property
    def num_load_blocks(self) -> float:
        """Blocks that its requests hold or will, those that wait counted like those that run."""
        beat = self.heartbeat
        mean_blocks = max(1.0, beat.num_used_blocks / max(1, beat.num_running))
        return beat.num_used_blocks + beat.num_waiting * mean_blocks + self._num_sent_blocks

    def take(self, heartbeat: Heartbeat) -> None:
        """Takes news from the engine."""
        self.heartbeat = heartbeat
        self._num_sent_blocks = 0
        # What was sent just before the heartbeat may be missing in it, but not in the one after.
        self._expected_before, self._expected = self._expected, set()
        changes = heartbeat.prefixes
        if changes.reset:
            self._known.clear()
        self._known.difference_update(read_keys(changes.removed))
        if len(self._known) < MAX_KNOWN_PREFIXES:
            self._known.update(read_keys(changes.added))

    def expect(self, keys: Iterable[int], *, num_blocks: int) -> None:
        """Notes a request that was sent: its blocks will be there before a heartbeat says so.

        Args:
            keys: the keys of its prompt's blocks.
            num_blocks: blocks that it takes beside those that are shared.
        """
        self._num_sent_blocks += num_blocks
        self._expected.update(keys)

    def count_cached(self, keys: Iterable[int]) -> int:
        """Returns how many of a prompt's blocks, from the first one on, the engine should have."""
        count = 0
        for key in keys:
            if not (key in self._known or key in self._expected or key in self._expected_before):
                break
            count += 1
        return count
