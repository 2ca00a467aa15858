"""Follows the cached blocks of all ranks for one subscriber, in whatever protocol it speaks."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.engine.kv_cache.block_events import BlockEvent, BlockEvents, Cleared, Stored

POLL_S = 0.05
"""Time between two looks at the changes; steps never wake a subscriber, so they do not pay."""
SNAPSHOT_BLOCKS = 512
"""Blocks in a part of a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPart:
    """One message: changes of a rank, or a part of its snapshot.

    number: of the changes, or of the last ones that the snapshot includes. index, count: place
    among the parts of a snapshot, and their number; count is 0 for changes.
    """

    rank: int
    number: int
    events: Sequence[BlockEvent]
    index: int = 0
    count: int = 0


async def follow(
    ranks: Mapping[int, BlockEvents], cursors: Mapping[int, int]
) -> AsyncIterator[EventPart]:
    """Yields what a subscriber must apply, without an end.

    A subscriber that reads too slowly gets a snapshot in place of the changes that it missed.

    Args:
        ranks: the records of the ranks to follow.
        cursors: number of the last changes that the subscriber has applied, by rank.
    """
    numbers: dict[int, int] = dict(cursors)
    while True:
        for rank, record in ranks.items():
            number = numbers.get(rank)
            batches = None if number is None else record.since(number)
            if batches is None:
                for part in _snapshot(rank, record):
                    yield part
                    numbers[rank] = part.number
            else:
                for batch in batches:
                    yield EventPart(rank=rank, number=batch.number, events=batch.events)
                    numbers[rank] = batch.number
        await asyncio.sleep(POLL_S)


def chains(events: Sequence[BlockEvent]) -> Iterator[list[BlockEvent]]:
    """Splits events where the kind or the tier changes, and where a chain of blocks ends.

    Stored blocks of one part follow each other in a prompt, all with tokens or all without, and
    have one adapter or none.
    """
    part: list[BlockEvent] = []
    for event in events:
        if part and not _continues(part[-1], event):
            yield part
            part = []
        part.append(event)
    if part:
        yield part


def _snapshot(rank: int, record: BlockEvents) -> Iterator[EventPart]:
    number, blocks = record.snapshot()
    starts = range(0, max(1, len(blocks)), SNAPSHOT_BLOCKS)
    for index, start in enumerate(starts):
        yield EventPart(
            rank=rank,
            number=number,
            events=blocks[start : start + SNAPSHOT_BLOCKS],
            index=index,
            count=len(starts),
        )


def _continues(last: BlockEvent, event: BlockEvent) -> bool:
    if type(last) is not type(event) or isinstance(last, Cleared) or isinstance(event, Cleared):
        return False
    if last.tier is not event.tier:
        return False
    if isinstance(last, Stored) and isinstance(event, Stored):
        own, before = event.content, last.content
        is_alike = (own.token_ids is None) == (before.token_ids is None)
        return own.parent == last.key and is_alike and own.adapter == before.adapter
    return True
