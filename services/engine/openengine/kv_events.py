"""Converts events of cached blocks to OpenEngine's, for the ranks that a caller names."""

import time
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvBlockHash,
    KvEvent,
    KvEventBatch,
    SubscribeKvEventsRequest,
)
from services.engine.edge.kv_events import EventPart, chains, follow
from services.engine.errors import InvalidRequestError, SlowReaderError, UnsupportedError
from services.engine.kv_cache.block_events import BlockEvent, BlockEvents, Removed, Stored, Tier

ENCODING = "decimal_int64"
"""The form of hashes that Dynamo reads: a signed integer in ASCII."""
_MEDIA = {
    Tier.GPU: openengine_pb2.STORAGE_MEDIUM_GPU,
    Tier.HOST: openengine_pb2.STORAGE_MEDIUM_CPU_PINNED,
    Tier.DISK: openengine_pb2.STORAGE_MEDIUM_DISK,
}


def chosen_ranks(records: Sequence[BlockEvents], ranks: Sequence[int]) -> Mapping[int, BlockEvents]:
    """Returns the records of the ranks that a caller names; of all if it names none.

    Raises:
        InvalidRequestError: a rank does not exist.
    """
    if unknown := [rank for rank in ranks if rank >= len(records)]:
        raise InvalidRequestError(f"rank {unknown[0]} does not exist; there are {len(records)}")
    return {rank: records[rank] for rank in ranks or range(len(records))}


async def batches(
    records: Mapping[int, BlockEvents], request: SubscribeKvEventsRequest, block_size: int
) -> AsyncIterator[KvEventBatch]:
    """Yields the batches of a subscription, numbered without gaps.

    Raises:
        SlowReaderError: the caller missed events; the protocol has no way to begin again.
        UnsupportedError: several ranks are to resume, which have numbers of their own.
    """
    cursors: dict[int, int] = {}
    if request.start_sequence_number:
        if len(records) > 1:
            raise UnsupportedError("start_sequence_number needs one data_parallel_rank")
        cursors = dict.fromkeys(records, request.start_sequence_number - 1)
    elif not request.include_snapshot:
        cursors = {rank: record.last_number for rank, record in records.items()}
    begun = set() if request.include_snapshot else set(records)
    async for part in follow(records, cursors):
        if part.count and part.index == 0 and part.rank in begun:
            raise SlowReaderError("events were missed: subscribe again")
        begun.add(part.rank)
        yield _batch(part, block_size)


def _batch(part: EventPart, block_size: int) -> KvEventBatch:
    batch = KvEventBatch(
        sequence_number=part.number - max(0, part.count - 1 - part.index),
        timestamp_unix_nanos=time.time_ns(),
        data_parallel_rank=part.rank,
    )
    if part.count and part.index == 0:
        batch.events.append(KvEvent(all_blocks_cleared=AllBlocksCleared()))
    batch.events.extend(_events(part.events, block_size))
    return batch


def _events(events: Sequence[BlockEvent], block_size: int) -> Iterator[KvEvent]:
    """Yields events; blocks without tokens are left out, as routers find blocks by tokens."""
    for chain in chains(events):
        first = chain[0]
        if isinstance(first, Stored):
            if first.content.token_ids is not None:
                yield KvEvent(block_stored=_stored(chain, first, block_size))
        elif isinstance(first, Removed):
            hashes = [_hash(each.key) for each in chain if isinstance(each, Removed)]
            removed = BlockRemoved(block_hashes=hashes, medium=_MEDIA[first.tier])
            yield KvEvent(block_removed=removed)
        else:
            yield KvEvent(all_blocks_cleared=AllBlocksCleared())


def _stored(chain: Sequence[BlockEvent], first: Stored, block_size: int) -> BlockStored:
    blocks = [each for each in chain if isinstance(each, Stored)]
    parent = first.content.parent
    return BlockStored(
        block_hashes=[_hash(each.key) for each in blocks],
        parent_block_hash=None if parent is None else _hash(parent),
        token_ids=array("i", b"".join(each.content.token_ids or b"" for each in blocks)),
        block_size=block_size,
        lora_name=first.content.adapter,
        medium=_MEDIA[first.tier],
    )


def _hash(key: bytes) -> KvBlockHash:
    number = int.from_bytes(key[:8], "little", signed=True)
    return KvBlockHash(value=str(number).encode(), encoding=ENCODING)
