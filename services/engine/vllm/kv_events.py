"""Converts events of cached blocks to the gateway's protocol."""

import time
from array import array
from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated.common_pb2 import (
    KV_CACHE_LOCALITY_LOCAL,
    KV_CACHE_TIER_DEVICE,
    KV_CACHE_TIER_DISK,
    KV_CACHE_TIER_HOST,
    KvBlock,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvCacheEvent,
    KvEventBatch,
    KvSnapshotChunk,
)

from services.engine.edge.kv_events import EventPart, chains
from services.engine.kv_cache.block_events import BlockEvent, Removed, Stored, Tier

_TIERS = {
    Tier.GPU: KV_CACHE_TIER_DEVICE,
    Tier.HOST: KV_CACHE_TIER_HOST,
    Tier.DISK: KV_CACHE_TIER_DISK,
}


def part_to_batch(part: EventPart, block_size: int) -> KvEventBatch:
    """Returns the batch of a part.

    The gateway numbers the parts of a snapshot as well, up to the number that it was taken at, and
    expects the first to begin with a clearing. Blocks without tokens are left out: it finds blocks
    by their tokens.
    """
    batch = KvEventBatch(
        sequence_number=part.number - max(0, part.count - 1 - part.index),
        timestamp=time.time(),
        dp_rank=part.rank,
    )
    if part.count:
        batch.snapshot.CopyFrom(KvSnapshotChunk(index=part.index, count=part.count))
        if part.index == 0:
            batch.events.append(KvCacheEvent(cleared=KvCacheCleared()))
    batch.events.extend(_events(part.events, block_size))
    return batch


def hash_of(key: bytes) -> int:
    """Returns the hash of a block: the first 8 bytes of its key as a signed integer."""
    return int.from_bytes(key[:8], "little", signed=True)


def _events(events: Sequence[BlockEvent], block_size: int) -> Iterator[KvCacheEvent]:
    for chain in chains(events):
        first = chain[0]
        if isinstance(first, Stored):
            if first.content.token_ids is not None:
                yield KvCacheEvent(stored=_stored(chain, first, block_size))
        elif isinstance(first, Removed):
            hashes = [hash_of(each.key) for each in chain if isinstance(each, Removed)]
            removed = KvBlocksRemoved(
                block_hashes=hashes, tier=_TIERS[first.tier], locality=KV_CACHE_LOCALITY_LOCAL
            )
            yield KvCacheEvent(removed=removed)
        else:
            yield KvCacheEvent(cleared=KvCacheCleared())


def _stored(chain: Sequence[BlockEvent], first: Stored, block_size: int) -> KvBlocksStored:
    parent = first.content.parent
    return KvBlocksStored(
        parent_block_hash=None if parent is None else hash_of(parent),
        tier=_TIERS[first.tier],
        locality=KV_CACHE_LOCALITY_LOCAL,
        lora_name=first.content.adapter or None,
        blocks=[
            KvBlock(
                block_hash=hash_of(each.key),
                token_ids=array("i", each.content.token_ids or b""),
                block_size=block_size,
            )
            for each in chain
            if isinstance(each, Stored)
        ],
    )
