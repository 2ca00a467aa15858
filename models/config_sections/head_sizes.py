"""Sizes of the heads of attention in a layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Sizes of a layer's heads."""

    head_dim: int
    num_kv_heads: int
