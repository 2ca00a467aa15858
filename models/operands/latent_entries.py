"""Entries of latent attention: the parts that the cache takes, and what is left to do to them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentEntries:
    """The parts that the cache takes of each of T tokens; each token's elements are contiguous.

    latent: [T, C], which keys and values are made from.
    rotated: [T, 1, P], the rotated elements that all heads' keys share.
    index_keys: [T, D] for an indexer; None without one.
    """

    latent: torch.Tensor
    rotated: torch.Tensor
    index_keys: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTransform:
    """The norm of latent vectors, and rotary positions of queries and of the keys' shared part.

    cos, signed_sin: [T, 1, P], see `models.ops.elementwise.rotary.rotary`.
    weight: [C], of the norm.
    eps: of the norm.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    weight: torch.Tensor
    eps: float
