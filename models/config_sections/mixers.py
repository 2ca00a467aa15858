"""Kinds of token mixers in a model's layers, and the numbers of their cache entries."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

ATTENTION: Final = "attention"
STATE: Final = "state"
BOTH: Final = "both"
"""Attention and a state side by side."""
NONE: Final = "none"

Part = Literal["attention", "state"]
"""A part of a layer that keeps a cache entry."""
Window = int | Literal["state"] | None
"""Keys that a query sees, its own included; None: all; STATE: the entry is a state."""

_PARTS: Mapping[str, tuple[Part, ...]] = {
    ATTENTION: (ATTENTION,),
    STATE: (STATE,),
    BOTH: (ATTENTION, STATE),
    NONE: (),
}


def cache_entries(mixers: Sequence[str], num_layers: int) -> list[tuple[int, Part]]:
    """Returns the layer and the part of each cache entry of a model, in order.

    mixers: kind of each layer's mixer; empty means attention everywhere.
    """
    kinds = mixers or (ATTENTION,) * num_layers
    return [(layer, part) for layer, kind in enumerate(kinds) for part in _PARTS[kind]]
