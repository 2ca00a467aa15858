"""Pairs of blocks that a step copies before it computes, as they travel."""

from collections.abc import Sequence

from services.engine.batch import StateMetadata, pack_int32


def pack_copies(
    saved: Sequence[tuple[int, int]], restored: Sequence[tuple[int, int]]
) -> StateMetadata:
    """Packs pairs of blocks of states, from and to, that a step copies in this order."""
    saved_from, saved_to = pack_pairs(saved)
    restored_from, restored_to = pack_pairs(restored)
    return StateMetadata(
        saved_from=saved_from,
        saved_to=saved_to,
        restored_from=restored_from,
        restored_to=restored_to,
    )


def pack_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
    """Packs the first and the second integers of pairs."""
    return pack_int32([first for first, _ in pairs]), pack_int32([second for _, second in pairs])
