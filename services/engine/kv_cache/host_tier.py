"""Blocks in the host's memory: the content of each slot, and the copies that steps order.

A worker makes a step's copies before it computes. It reads all blocks and slots before it writes
any. So a slot may get other content in the step that still loads from it, and a block in the step
that stores it. Content counts as present from the step after the one that stores it.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engine.kv_cache.block_events import Tier
from services.engine.kv_cache.prefix_journal import BlockJournal
from services.engine.kv_cache.recompute_rule import RecomputeRule

ENTRY_BYTES = 34
"""Bytes of an entry's name: a prefix key and a part, see `tier_entry`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Sizes of the host's memory for blocks, which a worker reports.

    num_slots: blocks that it holds. max_step_loads: most blocks that a step may load.
    block_load_s: seconds that loading one takes. disk_entries: blocks that the disk below has from
    earlier; None without a disk.
    """

    num_slots: int
    max_step_loads: int
    block_load_s: float = 0.0
    disk_entries: Sequence[bytes] | None = None


@dataclass(slots=True)
class TierCounts:
    """Counts of the tiers below the GPU, which outlive a worker.

    num_stored, num_loaded: blocks copied to the host's memory and back. hit_tokens: tokens of
    prefixes that came back instead of being computed. copy_s: time of the copies on the first rank.
    num_written, num_read: blocks written to disk and read from it. disk_hit_tokens: tokens of
    prefixes that were read. read_s: time of the reads. num_faults: files that were damaged or
    foreign. num_drops: blocks that were not written.
    """

    num_stored: int = 0
    num_loaded: int = 0
    hit_tokens: int = 0
    copy_s: float = 0.0
    num_written: int = 0
    num_read: int = 0
    disk_hit_tokens: int = 0
    read_s: float = 0.0
    num_faults: int = 0
    num_drops: int = 0


@dataclass(slots=True)
class DiskNews:
    """Changes since the last news; lists of entries.

    added: written. removed: without a file now. arrived: read into their slots. failed: reads that
    found no block. read_us: time of the reads. num_faults: files that were damaged or foreign.
    num_drops: blocks that were not written, as the disk failed or was too slow.
    """

    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    read_us: int = 0
    num_faults: int = 0
    num_drops: int = 0


@dataclass(frozen=True, slots=True)
class TierCopies:
    """The copies of one step.

    stored: pairs of a block and the slot where it goes. entries: names of these. loaded: pairs of a
    slot and the block. reads: pairs of an entry on disk and the slot.
    """

    stored: list[tuple[int, int]]
    entries: list[bytes]
    loaded: list[tuple[int, int]]
    reads: list[tuple[bytes, int]]


@dataclass(frozen=True, slots=True)
class _Sent:
    """The copies of a step in flight.

    entries: content to store. block_ids: blocks to load. reads: entries on disk.
    """

    step_id: int
    entries: list[bytes]
    block_ids: list[int]
    reads: list[bytes]


def tier_entry(key: bytes, part: int) -> bytes:
    """Names the content of one block: of a layer group, or a page of the snapshot after a key."""
    return key + part.to_bytes(2, "little")


def key_of_entry(entry: bytes) -> bytes | None:
    """Returns the key of a block of the first layer group, None of other blocks."""
    return entry[:-2] if entry.endswith(b"\0\0") else None


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
        self.journal: BlockJournal | None = None
        """Notes which blocks of the first layer group are here; None without such a group."""
        self._max_step_loads = limits.max_step_loads
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by the time of their last use
        self._free = list(reversed(range(limits.num_slots)))
        self._stored: dict[bytes, int] = {}
        self._loaded: dict[int, int] = {}
        self._ordered_reads: dict[bytes, int] = {}
        self._reading: dict[bytes, int] = {}
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
        return bool(self._stored or self._loaded or self._ordered_reads)

    @property
    def read_room(self) -> int:
        """Blocks that may be read from disk now: half of the slots keep what they have."""
        return (len(self._slots) + len(self._free) + len(self._reading)) // 2 - len(self._reading)

    @property
    def room(self) -> int:
        """Blocks that the step being planned can still load."""
        return self._max_step_loads - len(self._loaded)

    def store(self, entry: bytes, block_id: int) -> None:
        """Keeps the content of a block that earlier steps computed and this one may overwrite."""
        if block_id in self._loaded:
            return  # its content arrives with this step, and was here before
        if entry in self._reading:
            return
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

    def is_reading(self, entry: bytes) -> bool:
        """Whether an entry is on its way from the disk."""
        return entry in self._reading

    def read(self, entry: bytes) -> bool:
        """Orders an entry to be read from disk into a slot; returns whether there is one."""
        slot = self._take_slot()
        if slot is not None:
            self._reading[entry] = self._ordered_reads[entry] = slot
        return slot is not None

    def end_read(self, entry: bytes, *, has_arrived: bool) -> None:
        """Takes the end of a read; one that was given up before is ignored."""
        slot = self._reading.pop(entry, None)
        if slot is not None and has_arrived:
            self._enter(entry, slot)
            self.counts.num_read += 1
        elif slot is not None:
            self._free.append(slot)

    def take_copies(self, step_id: int) -> TierCopies | None:
        """Returns the copies of the step that is sent now; None for none."""
        if not self.has_copies:
            return None
        copies = TierCopies(
            stored=[(block_id, self._slots[entry]) for entry, block_id in self._stored.items()],
            entries=list(self._stored),
            loaded=[(slot, block_id) for block_id, slot in self._loaded.items()],
            reads=list(self._ordered_reads.items()),
        )
        self._in_flight.append(
            _Sent(step_id, copies.entries, list(self._loaded), list(self._ordered_reads))
        )
        self._stored, self._loaded, self._ordered_reads = {}, {}, {}
        return copies

    def settle(self, step_id: int) -> None:
        """Notes that a step and all before it have run."""
        while self._in_flight and self._in_flight[0].step_id <= step_id:
            self._in_flight.popleft()

    def retreat(self) -> tuple[list[int], list[bytes]]:
        """Forgets the copies of steps in flight, which did not run.

        Returns:
            The blocks that they load, and the entries that they read from disk.
        """
        block_ids: list[int] = []
        reads: list[bytes] = []
        for sent in self._in_flight:
            block_ids += sent.block_ids
            reads += sent.reads
            for entry in sent.entries:
                if entry in self._slots:
                    self._free.append(self._leave(entry))
            for entry in sent.reads:
                self.end_read(entry, has_arrived=False)
        self._in_flight.clear()
        return block_ids, reads

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
        if self.journal is not None and (key := key_of_entry(entry)) is not None:
            self.journal.stored(key, tier=Tier.HOST)

    def _leave(self, entry: bytes) -> int:
        if self.journal is not None and (key := key_of_entry(entry)) is not None:
            self.journal.removed(key, Tier.HOST)
        return self._slots.pop(entry)
