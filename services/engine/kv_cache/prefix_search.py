"""Finds the longest prefix of which every group of layers has the blocks that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from services.engine.kv_cache.cache_groups import CacheGroups


@dataclass(frozen=True, slots=True)
class SnapshotSearch:
    """Snapshots that are present.

    is_present: whether the one after a key is. interval: tokens between two that may be.
    """

    is_present: Callable[[bytes], bool]
    interval: int


class PrefixSearch:
    """Searches blocks and snapshots of states that are present somewhere.

    A group with a window needs only the blocks that the token after the prefix attends to.
    """

    def __init__(
        self,
        groups: CacheGroups,
        has_block: Sequence[Callable[[bytes], bool]],
        snapshots: SnapshotSearch | None,
    ) -> None:
        """Prepares searches.

        Args:
            groups: of layers that keep tokens.
            has_block: for each of them, whether the block of a key is present.
            snapshots: of states; None of a model without any.
        """
        self._groups = groups
        self._has_block = has_block
        self._snapshots = snapshots

    def length(self, keys: Sequence[bytes], limit: int) -> int:
        """Returns the number of blocks of the longest prefix within `limit`, without its state."""
        multiple = self._groups.prefix_multiple
        length = limit // multiple * multiple
        for group, (has_block, window) in enumerate(
            zip(self._has_block, self._groups.windows, strict=True)
        ):
            if window is None:
                span = self._groups.span(group)
                lasts = islice(keys, span - 1, length, span)
                length = span * sum(1 for _ in takewhile(has_block, lasts))
        length = length // multiple * multiple
        while (hole := self._last_hole(keys, length)) is not None:
            length = hole // multiple * multiple
        return length

    def snapshot_length(self, keys: Sequence[bytes], length: int) -> int:
        """Returns the blocks before the last snapshot within `length`; 0 if there is none."""
        snapshots, size = self._snapshots, self._groups.block_size
        assert snapshots is not None, "the model has states"
        last = length * size // snapshots.interval * snapshots.interval
        for position in range(last, 0, -snapshots.interval):
            num_blocks = position // size
            is_present = snapshots.is_present(keys[num_blocks - 1])
            if is_present and self._last_hole(keys, num_blocks) is None:
                return num_blocks
        return 0

    def _last_hole(self, keys: Sequence[bytes], length: int) -> int | None:
        """Returns the last absent block that the token after `length` blocks reads, if any."""
        for group, has_block in enumerate(self._has_block):
            first = self._groups.first_block(group, length * self._groups.block_size)
            for i in range(length - 1, first - 1, -self._groups.span(group)):
                if not has_block(keys[i]):
                    return i
        return None
