"""How tokens become compressed entries, and what a layer's entries are."""

from dataclasses import dataclass

import torch

from models.operands.index_queries import IndexQueries
from models.operands.row_pages import RowPages


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryMaker:
    """How tokens become an entry. D elements of an entry, P rotated ones.

    A token gives a value and a gate of W * D elements, W being 2 if entries overlap, else 1. An
    entry is the sum over its tokens of values, weighted for each element by the softmax of gates.
    With overlap it also has the tokens of the entry before: they give the first D elements, its
    own tokens the last.

    begin: place in a token's row where values begin; gates follow.
    position_bias: [rate, W * D] float32, added to the gates by place in the entry.
    norm_weight: [D], of the norm with `eps` after the sum.
    frequencies: [P / 2] float32, angle of each pair per position; table_scale: of sine and cosine.
    """

    begin: int
    rate: int
    overlaps: bool
    position_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    frequencies: torch.Tensor
    table_scale: float

    @property
    def size(self) -> int:
        """Elements of an entry."""
        return len(self.norm_weight)

    @property
    def width(self) -> int:
        """Elements of a token's value."""
        return self.position_bias.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """A layer's compressed entries.

    pages: of rows with a key, then the key of the index. makers: of these one or two keys.
    index: queries that choose entries; None: all are seen.
    """

    pages: RowPages
    makers: tuple[EntryMaker, ...]
    index: IndexQueries | None
