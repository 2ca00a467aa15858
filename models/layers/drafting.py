"""The part of a model that makes drafts for another one."""

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from models.kv_cache import CacheSpec


class DraftingModel(Protocol):
    """A model beside another one, with caches of its own."""

    def cache_specs(self) -> list[CacheSpec]:
        """Returns each layer's cache entry."""

    def modules(self) -> Iterator[nn.Module]:
        """Returns its modules."""
