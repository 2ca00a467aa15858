"""Converts events of cached blocks to the engine's own protocol."""

from collections.abc import Sequence

from protos.engine.v1.kv_events_pb2 import (
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvEvent,
    KvSnapshotPart,
    KvTier,
    SubscribeKvEventsResponse,
)
from services.engine.edge.kv_events import EventPart, chains
from services.engine.kv_cache.block_events import BlockEvent, Removed, Stored, Tier

KEY_BYTES = 8
"""Bytes sent of each key, as in heartbeats."""
_TIERS = {
    Tier.GPU: KvTier.KV_TIER_GPU,
    Tier.HOST: KvTier.KV_TIER_HOST,
    Tier.DISK: KvTier.KV_TIER_DISK,
}


def part_to_proto(part: EventPart) -> SubscribeKvEventsResponse:
    """Returns the message of a part."""
    snapshot = KvSnapshotPart(index=part.index, count=part.count) if part.count else None
    return SubscribeKvEventsResponse(
        data_parallel_rank=part.rank,
        sequence_number=part.number,
        snapshot=snapshot,
        events=[_event(chain) for chain in chains(part.events)],
    )


def _event(chain: Sequence[BlockEvent]) -> KvEvent:
    stored = [each for each in chain if isinstance(each, Stored)]
    removed = [each for each in chain if isinstance(each, Removed)]
    if stored:
        first = stored[0]
        parent = first.content.parent
        return KvEvent(
            stored=KvBlocksStored(
                tier=_TIERS[first.tier],
                parent_key=b"" if parent is None else parent[:KEY_BYTES],
                keys=b"".join(each.key[:KEY_BYTES] for each in stored),
                token_ids=b"".join(each.content.token_ids or b"" for each in stored),
                adapter=first.content.adapter,
            )
        )
    if removed:
        keys = b"".join(each.key[:KEY_BYTES] for each in removed)
        return KvEvent(removed=KvBlocksRemoved(tier=_TIERS[removed[0].tier], keys=keys))
    return KvEvent(cleared=KvCacheCleared())
