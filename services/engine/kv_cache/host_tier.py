"""Blocks in the host's memory: the content of each slot, and the copies that steps order.

A worker makes a step's copies before it computes. It reads all blocks and slots before it writes
any. So a slot may get other content in the step that still loads from it, and a block in the step
that stores it. Content counts as present from the step after the one that stores it.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from services.engine.kv_cache.recompute_rule import RecomputeRule


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Sizes of the host's memory for blocks, which a worker reports.

    num_slots: blocks that it holds. max_step_loads: most blocks that a step may load.
    block_load_s: seconds that loading one takes.
    """

    num_slots: int
    max_step_loads: int
    block_load_s: float = 0.0


@dataclass(slots=True)
class TierCounts:
    """Counts of the tiers below the GPU, which outlive a worker.

    num_stored, num_loaded: blocks copied to the host's memory and back. hit_tokens: tokens of
    prefixes that came back instead of being computed. copy_s: time of the copies on the first rank.
    """

    num_stored: int = 0
    num_loaded: int = 0
    hit_tokens: int = 0
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierCopies:
    """The copies of one step.

    stored: pairs of a block and the slot where it goes. loaded: pairs of a slot and the block.
    """

    stored: list[tuple[int, int]]
    loaded: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Sent:
    """The copies of a step in flight: entries that it stores, and blocks that it loads."""

    step_id: int
    entries: list[bytes]
    block_ids: list[int] = field(default_factory=list)


def tier_entry(key: bytes, part: int) -> bytes:
    """Names the content of one block: of a layer group, or a page of the snapshot after a key."""
    return key + part.to_bytes(2, "little")


class HostTier:
    """Chooses slots for blocks that leave the GPU, and finds their content again.

    A slot is reused once all others were used later.
    """

    def __init__(self, limits: HostLimits, counts: TierCounts | None = None) -> None:
        """Starts empty.

        Args:
            limits: of the worker.
            counts: of the tiers before this one.
        """
        self.rule = RecomputeRule(limits.block_load_s)
        self.counts = counts or TierCounts()
        self._max_step_loads = limits.max_step_loads
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by the time of their last use
        self._free = list(reversed(range(limits.num_slots)))
        self._stored: dict[bytes, int] = {}
        self._loaded: dict[int, int] = {}
        self._in_flight: deque[_Sent] = deque()

    def __len__(self) -> int:
        """Blocks that the host's memory holds."""
        return len(self._slots)

    def __contains__(self, entry: bytes) -> bool:
        """Whether the step being planned can load an entry."""
        return entry in self._slots and entry not in self._stored

    @property
    def has_copies(self) -> bool:
        """Whether the step being planned has any."""
        return bool(self._stored or self._loaded)

    @property
    def room(self) -> int:
        """Blocks that the step being planned can still load."""
        return self._max_step_loads - len(self._loaded)

    def store(self, entry: bytes, block_id: int) -> None:
        """Keeps the content of a block that earlier steps computed and this one may overwrite."""
        if block_id in self._loaded:
            return  # its content arrives with this step, and was here before
        if entry in self._slots:
            self._slots.move_to_end(entry)
            return
        slot = self._take_slot()
        if slot is not None:
            self._enter(entry, slot)
            self._stored[entry] = block_id
            self.counts.num_stored += 1

    def use(self, entry: bytes) -> int:
        """Returns the slot of an entry that the step being planned loads."""
        self._slots.move_to_end(entry)
        return self._slots[entry]

    def load(self, slot: int, block_id: int) -> None:
        """Orders a copy of a used slot's content into a block."""
        self._loaded[block_id] = slot
        self.counts.num_loaded += 1

    def cancel_load(self, block_id: int) -> None:
        """Drops the order to load a block, if any, that the same step fills with other content."""
        if self._loaded.pop(block_id, None) is not None:
            self.counts.num_loaded -= 1

    def take_copies(self, step_id: int) -> TierCopies | None:
        """Returns the copies of the step that is sent now; None for none."""
        if not self.has_copies:
            return None
        copies = TierCopies(
            stored=[(block_id, self._slots[entry]) for entry, block_id in self._stored.items()],
            loaded=[(slot, block_id) for block_id, slot in self._loaded.items()],
        )
        self._in_flight.append(_Sent(step_id, list(self._stored), list(self._loaded)))
        self._stored, self._loaded = {}, {}
        return copies

    def settle(self, step_id: int) -> None:
        """Notes that a step and all before it have run."""
        while self._in_flight and self._in_flight[0].step_id <= step_id:
            self._in_flight.popleft()

    def retreat(self) -> list[int]:
        """Forgets what steps in flight store, which did not run; returns the blocks they load."""
        block_ids: list[int] = []
        for sent in self._in_flight:
            block_ids += sent.block_ids
            for entry in sent.entries:
                if entry in self._slots:
                    self._free.append(self._leave(entry))
        self._in_flight.clear()
        return block_ids

    def _take_slot(self) -> int | None:
        """Returns a slot for other content; None if this step fills all of them."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slots), None)
        if oldest is None or oldest in self._stored:
            return None
        return self._leave(oldest)

    def _enter(self, entry: bytes, slot: int) -> None:
        self._slots[entry] = slot

    def _leave(self, entry: bytes) -> int:
        return self._slots.pop(entry)
