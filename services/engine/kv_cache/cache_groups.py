"""Which layers keep blocks alike, and how long they keep them.

Layers that attend to all keys form groups of one kind, those with a sliding window groups of
another. A request has a block of each group for the same tokens, until they fall out of the group's
window. All blocks come from one pool: groups are of equal size, and the first layers of all groups
share their memory, as do the second ones and so on, so that a block may serve any group.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8
"""How many groups layers are divided into, about: each of them costs a block table a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose keys and values of the same tokens are in the same block."""

    layers: tuple[int, ...]
    """Their numbers, ascending."""
    window: int | None
    """Keys that a query sees, its own among them; None means all, and keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroups:
    """What groups need of the pool."""

    block_size: int
    """Tokens in one block."""
    max_query_tokens: int
    """Most tokens of a request in one step."""
    windows: tuple[int | None, ...] = (None,)
    """Each group's window."""

    def __len__(self) -> int:
        """How many groups there are."""
        return len(self.windows)

    def first_block(self, group: int, position: int) -> int:
        """Returns the first block, counted from the sequence's start, that a query there reads."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def most_blocks(self, group: int, num_tokens: int) -> int:
        """Returns how many blocks a request holds at once until it has so many tokens, at most."""
        num_blocks = -(-num_tokens // self.block_size)
        window = self.windows[group]
        if window is None:
            return num_blocks
        # They may begin and end in the middle of a block.
        return min(num_blocks, (window - 2 + self.max_query_tokens) // self.block_size + 2)

    def num_tokens(self, num_blocks: int, *, limit: int) -> int:
        """Returns how many tokens one request can have that holds all blocks.

        Args:
            num_blocks: of the pool, without the null block.
            limit: where the search stops; the result may be as large in whole blocks.
        """

        def needed(length: int) -> int:
            tokens = length * self.block_size
            return sum(self.most_blocks(group, tokens) for group in range(len(self)))

        lengths = range(-(-limit // self.block_size) + 1)
        return (bisect_right(lengths, num_blocks, key=needed) - 1) * self.block_size


def group_layers(windows: Sequence[int | None], *, max_model_len: int) -> tuple[LayerGroup, ...]:
    """Divides a model's layers.

    A kind of layers with more layers than a group has is divided into several groups; what a group
    has less than the others is memory that nobody uses.

    Args:
        windows: each layer's sliding window; None sees everything.
        max_model_len: a window that long sees everything too.

    Returns:
        The groups; those that keep everything come first.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kind = window if window is not None and window < max_model_len else None
        kinds.setdefault(kind, []).append(layer)
    size = len(windows)
    if len(kinds) > 1:
        size = max(min(map(len, kinds.values())), -(-len(windows) // MAX_GROUPS))
    return tuple(
        LayerGroup(layers=tuple(layers[start : start + size]), window=window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for start in range(0, len(layers), size)
    )
