"""Queries of an index that chooses blocks of keys, and what it chooses by."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndex:
    """Sizes and queries of the index of one layer.

    T query tokens, H kv heads, I elements of a key of the index.

    q: [T, H, I]. block_size: tokens of a block. top_blocks: most blocks of a query.
    local_blocks: last blocks, a query's own included, that are always among them.
    """

    q: torch.Tensor
    block_size: int
    top_blocks: int
    local_blocks: int

    def of(self, tokens: slice) -> "BlockIndex":
        """Returns the index with some queries."""
        return replace(self, q=self.q[tokens])
