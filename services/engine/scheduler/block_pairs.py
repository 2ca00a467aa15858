"""Pairs of blocks that a step copies before it computes, as they travel."""

from collections.abc import Sequence

from services.engine.batch import StateMetadata, pack_int32
from services.engine.kv_cache.snapshots import StateCopies


def pack_copies(copies: StateCopies) -> StateMetadata:
    """Packs the blocks of states that a step copies."""
    return StateMetadata(
        saved_from=pack_int32(copies.saved_from),
        saved_to=pack_int32(copies.saved_to),
        restored_from=pack_int32(copies.restored_from),
        restored_to=pack_int32(copies.restored_to),
    )


def pack_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
    """Packs the first and the second integers of pairs."""
    return pack_int32([first for first, _ in pairs]), pack_int32([second for _, second in pairs])
