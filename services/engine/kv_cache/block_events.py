"""The blocks of a rank that can be found, as numbered events for subscribers and as a snapshot."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple, TypeAlias

from services.engine.request import Request

MAX_EVENTS = 65536
"""Most events kept of a rank; a subscriber that missed more begins with a snapshot again."""
MAX_BATCH_EVENTS = 1024
"""Events of one batch at most."""


class Tier(Enum):
    """The memory that holds a block."""

    GPU = 1
    HOST = 2
    DISK = 3


class BlockContent(NamedTuple):
    """The prefix that a block's key stands for.

    parent: key of the block before it; None of a first block. token_ids: int32; None if tokens do
    not say what the block holds, as after an image. adapter: name of the one that computed it;
    empty without.
    """

    parent: bytes | None
    token_ids: bytes | None
    adapter: str = ""


class Stored(NamedTuple):
    """A block can be found in a tier from now on."""

    key: bytes
    tier: Tier
    content: BlockContent


class Removed(NamedTuple):
    """A block cannot be found in a tier any more."""

    key: bytes
    tier: Tier


class Cleared(NamedTuple):
    """No block can be found any more, in any tier."""


BlockEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in their order; batches are numbered without gaps."""

    number: int
    events: tuple[BlockEvent, ...]


class BlockEvents:
    """One rank's record of the blocks that can be found, and of the last changes to it.

    It outlives workers. Its numbers start at the time in microseconds, so no number of a process
    comes again in the next one.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        """Starts without blocks; `clock` returns the time in nanoseconds."""
        self._held: dict[Tier, dict[bytes, Stored]] = {tier: {} for tier in Tier}
        self._pending: list[BlockEvent] = []
        self._batches: deque[EventBatch] = deque()
        self._num_events = 0
        self._last_number = clock() // 1000

    def stored(self, key: bytes, content: BlockContent, tier: Tier) -> None:
        """Records that a block can be found in a tier."""
        event = Stored(key, tier, content)
        self._held[tier][key] = event
        self._note(event)

    def removed(self, key: bytes, tier: Tier) -> None:
        """Records that a block cannot be found in a tier any more, if it was recorded."""
        if self._held[tier].pop(key, None) is not None:
            self._note(Removed(key, tier))

    def content_of(self, key: bytes) -> BlockContent | None:
        """Returns the content of a block that a tier holds, None if none does."""
        held = (blocks.get(key) for blocks in self._held.values())
        return next((block.content for block in held if block is not None), None)

    def clear(self) -> None:
        """Records that all blocks are gone, with the worker that had them."""
        if any(self._held.values()):
            for held in self._held.values():
                held.clear()
            self._note(Cleared())

    @property
    def last_number(self) -> int:
        """Number of the changes by now."""
        self._seal()
        return self._last_number

    def snapshot(self) -> tuple[int, list[Stored]]:
        """Returns the last number and all blocks by then; a parent comes before its children."""
        self._seal()
        blocks: list[Stored] = []
        for held in self._held.values():
            blocks.extend(_parents_first(held))
        return self._last_number, blocks

    def since(self, number: int) -> list[EventBatch] | None:
        """Returns the batches after a number; None if some are gone or the number is another's."""
        self._seal()
        num_missed = self._last_number - number
        if not 0 <= num_missed <= len(self._batches):
            return None
        return list(islice(self._batches, len(self._batches) - num_missed, None))

    def _note(self, event: BlockEvent) -> None:
        self._pending.append(event)
        if len(self._pending) >= MAX_BATCH_EVENTS:
            self._seal()

    def _seal(self) -> None:
        """Makes a batch of the events since the last one, and drops the oldest batches."""
        if not self._pending:
            return
        self._last_number += 1
        self._batches.append(EventBatch(self._last_number, tuple(self._pending)))
        self._num_events += len(self._pending)
        self._pending.clear()
        while self._num_events > MAX_EVENTS:
            self._num_events -= len(self._batches.popleft().events)


def contents_of(request: Request, first: int, last: int, block_size: int) -> list[BlockContent]:
    """Returns the contents of a request's blocks from `first` up to `last`."""
    data = array("i", request.token_ids[first * block_size : last * block_size]).tobytes()
    stride = 4 * block_size
    keys = request.block_keys
    adapter = "" if request.adapter is None else request.adapter.name
    num_plain = min((each.offset // block_size for each in request.images), default=last)
    return [
        BlockContent(
            keys[number - 1] if number else None,
            data[start : start + stride] if number < num_plain else None,
            adapter,
        )
        for number, start in zip(range(first, last), range(0, len(data), stride), strict=True)
    ]


def _parents_first(held: dict[bytes, Stored]) -> Iterator[Stored]:
    """Yields all blocks, each after its parent if that is held."""
    done: set[bytes] = set()
    for key in held:
        chain: list[Stored] = []
        block = held.get(key)
        while block is not None and block.key not in done:
            done.add(block.key)
            chain.append(block)
            block = held.get(block.content.parent) if block.content.parent else None
        yield from reversed(chain)
