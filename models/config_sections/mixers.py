"""Kinds of token mixers in a model's layers, and the numbers of their cache entries."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4
from models.config_sections.layer_types import (
    FEED_FORWARD_TYPES,
    HEAVILY_COMPRESSED,
    HYBRID,
    SPARSE_COMPRESSED,
    STATE_TYPES,
    read_layer_types,
)

ATTENTION: Final = "attention"
STATE: Final = "state"
BOTH: Final = "both"
"""Attention and a state side by side."""
NONE: Final = "none"
SHARED: Final = "shared"
"""Attention to what an earlier layer cached."""

COMPRESSED: Final = "compressed"
"""Attention to recent keys and to compressed ones."""
RECENT: Final = "recent"

Part = Literal["attention", "state", "recent"]
"""A part of a layer that keeps a cache entry."""
Window = int | Literal["state"] | None
"""Keys that a query sees, its own included; None: all; STATE: the entry is a state. A negative
number -n: the keys of its chunk of n positions, which begins at a multiple of n, up to its own."""

_PARTS: Mapping[str, tuple[Part, ...]] = {
    ATTENTION: (ATTENTION,),
    STATE: (STATE,),
    BOTH: (ATTENTION, STATE),
    NONE: (),
    SHARED: (),
    COMPRESSED: (ATTENTION, RECENT),
}
_KINDS = {
    **dict.fromkeys(STATE_TYPES, STATE),
    **dict.fromkeys(FEED_FORWARD_TYPES, NONE),
    HYBRID: BOTH,
    SPARSE_COMPRESSED: COMPRESSED,
    HEAVILY_COMPRESSED: COMPRESSED,
}
"""Names of layers in config.json that are not of attention alone."""


def read_mixers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Reads the kind of each layer's mixer; empty if all are attention.

    Raises:
        ConfigError: layer_types names no such kind, or not one for each layer.
    """
    types = read_layer_types(fields, num_layers)
    kinds = tuple(_KINDS.get(kind, ATTENTION) for kind in types or ())
    if fields.architecture() in GEMMA_4:
        num_sharing = fields.count("num_kv_shared_layers", 0, minimum=0)
        kinds = (ATTENTION,) * (num_layers - num_sharing) + (SHARED,) * num_sharing
    return () if set(kinds) <= {ATTENTION} else kinds


def cache_entries(mixers: Sequence[str], num_layers: int) -> list[tuple[int, Part]]:
    """Returns the layer and the part of each cache entry of a model, in order.

    mixers: kind of each layer's mixer; empty means attention everywhere.
    """
    kinds = mixers or (ATTENTION,) * num_layers
    return [(layer, part) for layer, kind in enumerate(kinds) for part in _PARTS[kind]]
