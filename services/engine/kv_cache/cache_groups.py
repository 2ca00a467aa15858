"""Layer groups: layers that keep the same blocks for the same tokens.

A group has layers of one kind: with the same window or chunk, without one, or with a state. A
request has one block per group for the same tokens until they leave the group's window, and for
each group of states as many blocks as a state takes, whatever the tokens. All blocks come from one
pool: groups are of equal size, and the n-th layers of all groups share memory, so a block can serve
any group.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

STATE: Final = "state"
"""Stands for a window where a cache entry is a state, as in `ModelConfig.cache_windows`."""
Window = int | Literal["state"] | None
"""Keys that a query sees, its own included; None: all; STATE: the entry is a state. A negative
number -n: the keys of its chunk of n positions, which begins at a multiple of n, up to its own."""

MAX_GROUPS = 8
"""Approximate limit: each group costs a block table in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep keys and values of the same tokens in the same block."""

    layers: tuple[int, ...]
    """Layer indices, ascending."""
    window: Window
    """Keys that a query of the layers attends to."""
    span: int = 1
    """Entries of a request's block table that name the same block. Those of layers that cache one
    row for several tokens hold that multiple of block_size tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroups:
    """The layer groups of a model that keep tokens, and the blocks that they need."""

    block_size: int
    """Tokens in one block."""
    max_query_tokens: int
    """Most tokens of a request in one step."""
    windows: tuple[int | None, ...] = (None,)
    """Each group's window; none of a model whose layers all keep states."""
    spans: tuple[int, ...] = ()
    """Each group's span, as in LayerGroup; empty: all are 1. Groups with a window have 1."""

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.windows)

    def span(self, group: int) -> int:
        """Returns the entries of a request's block table that name the same block."""
        return self.spans[group] if self.spans else 1

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, which keeps everything in blocks of block_size tokens."""
        return self.windows == (None,) and self.prefix_multiple == 1

    def begins_block(self, entry: int) -> bool:
        """Returns whether an entry of a block table is the first that names its block."""
        index, group = divmod(entry, len(self))
        return index % self.span(group) == 0

    def ends_block(self, entry: int) -> bool:
        """Returns whether an entry of a block table is the last that may name its block."""
        return self.begins_block(entry + len(self))

    def key_number(self, group: int, index: int) -> int:
        """Returns the number of the key under which the block of an entry of a group is known."""
        span = self.span(group)
        return index // span * span + span - 1

    @property
    def prefix_multiple(self) -> int:
        """Entries of which a shared prefix has a multiple: it holds only blocks that are full."""
        return max(self.spans, default=1)

    def first_block(self, group: int, position: int) -> int:
        """Returns the index of the sequence's first block that a query at `position` reads."""
        return first_seen(self.windows[group], position) // self.block_size

    def most_blocks(self, group: int, num_tokens: int) -> int:
        """Returns the most blocks that a request holds at once up to `num_tokens` tokens."""
        num_blocks = -(-num_tokens // (self.block_size * self.span(group)))
        window = self.windows[group]
        if window is None:
            return num_blocks
        # The tokens may begin and end in the middle of a block.
        return min(num_blocks, (abs(window) - 2 + self.max_query_tokens) // self.block_size + 2)

    def num_tokens(self, num_blocks: int, *, limit: int) -> int:
        """Returns the most tokens of one request that holds all blocks.

        Args:
            num_blocks: of the pool, without the null block.
            limit: bound of the search, rounded up to whole blocks.
        """

        def needed(length: int) -> int:
            tokens = length * self.block_size
            return sum(self.most_blocks(group, tokens) for group in range(len(self)))

        lengths = range(-(-limit // self.block_size) + 1)
        return (bisect_right(lengths, num_blocks, key=needed) - 1) * self.block_size


def first_seen(window: int | None, position: int) -> int:
    """Returns the first position whose key a query at `position` attends to."""
    if window is None:
        return 0
    if window < 0:
        return position // -window * -window
    return max(0, position - window + 1)


def group_layers(
    windows: Sequence[Window], *, max_model_len: int, spans: Sequence[int] = ()
) -> tuple[LayerGroup, ...]:
    """Divides a model's layers into groups; one without a window comes first, states come last.

    A kind with more layers than a group holds gets several groups, and a smaller group leaves
    memory unused: groups have the size that leaves the least. States fit into groups of any size,
    so the layers that keep tokens decide it.

    Args:
        windows: each layer's window.
        max_model_len: a window or chunk of at least this length counts as None.
        spans: each layer's span, as in LayerGroup; those of last layers may be left out, and are 1.
    """
    kinds: dict[int | None, list[int]] = {}
    states: list[int] = []
    for layer, window in enumerate(windows):
        if window == STATE:
            states.append(layer)
            continue
        kind = window if isinstance(window, int) and abs(window) < max_model_len else None
        kinds.setdefault(kind, []).append(layer)
    num_token_layers = len(windows) - len(states)
    size = num_token_layers or len(windows)
    if len(kinds) > 1:
        counts = [len(layers) for layers in kinds.values()]
        least = max(min(counts), -(-num_token_layers // MAX_GROUPS))
        sizes = {least, *(count for count in counts if count > least)}
        size = min(sizes, key=lambda size: (size * sum(-(-n // size) for n in counts), size))
    ordered = sorted(kinds, key=lambda kind: abs(kind or 0))
    of_tokens: list[tuple[Window, list[int]]] = [(kind, kinds[kind]) for kind in ordered]
    groups = (
        (window, layers[start : start + size])
        for window, layers in (*of_tokens, (STATE, states))
        for start in range(0, len(layers), size)
    )
    return tuple(
        LayerGroup(
            layers=tuple(layers),
            window=window,
            span=min(spans[layer] if layer < len(spans) else 1 for layer in layers),
        )
        for window, layers in groups
    )
