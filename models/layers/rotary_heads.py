"""Reorders the elements of heads for our rotation, while weights are loaded.

Families differ in which elements of a head form a pair, and in whether all are rotated. Reordering
the elements of both queries and keys does not change their products. So the rows of the projections
are reordered once, and kernels always rotate (i, i + D / 2), with angle 0 for elements that are not
rotated.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd

import torch
from torch import nn

from models.config_sections.rope import RopeConfig
from models.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import rotary_dim
from models.layers.weight import ShardId
from models.parallel.group import ParallelGroup


def head_order(head_dim: int, rope: RopeConfig, *, num_unrotated: int = 0) -> list[int]:
    """Returns for each element of our heads its index in the checkpoint's.

    num_unrotated elements come before the head_dim rotated ones in every head and keep their order.
    """
    size = rotary_dim(head_dim, rope)
    if rope.is_interleaved:
        first, second = list(range(0, size, 2)), list(range(1, size, 2))
    else:
        first, second = list(range(size // 2)), list(range(size // 2, size))
    order = _with_rest(first, second, head_dim)
    return [*range(num_unrotated), *(num_unrotated + index for index in order)]


def turned_first(head_dim: int, size: int) -> list[int]:
    """Returns the same where the halves of a head's first `size` elements form pairs."""
    return _with_rest(list(range(size // 2)), list(range(size // 2, size)), head_dim)


def _with_rest(first: list[int], second: list[int], head_dim: int) -> list[int]:
    rest = list(range(2 * len(first), head_dim))
    middle = len(rest) // 2
    return [*first, *rest[:middle], *second, *rest[middle:]]


def reorder_heads(loaded: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Reorders the rows of every head: of a weight, a bias, or a head's norm."""
    if list(order) == sorted(order):
        return loaded
    heads = loaded.view(-1, len(order), *loaded.shape[1:])
    return heads[:, list(order)].flatten(0, 1)


def reorder_elements(heads: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Reorders the elements of heads, [..., D], as `reorder_heads` does their rows."""
    starts = [0, *(at for at in range(1, len(order)) if order[at] != order[at - 1] + 1), len(order)]
    runs = [heads[..., order[at] : order[end - 1] + 1] for at, end in pairwise(starts)]
    return torch.cat(runs, dim=-1)


def keeps_blocks(order: Sequence[int], size: int) -> bool:
    """Returns whether reordered heads have the same rows in every block of `size` rows."""
    num_heads = size // gcd(size, len(order))  # after which blocks and heads begin together
    firsts = range(0, num_heads * len(order), len(order))
    return all(
        (first + at) // size == (first + index) // size
        for first in firsts
        for at, index in enumerate(order)
    )


class RotaryColumnLinear(MergedColumnParallelLinear):
    """Projections whose heads are reordered for our rotation.

    orders: of the heads of each projection; an empty one keeps it. replicas: as of the base.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        orders: Sequence[Sequence[int]],
        replicas: Sequence[int] | None = None,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        super().__init__(input_size, output_sizes, replicas=replicas, bias=bias, group=group)
        self._orders = orders

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether blocks of `multiple` rows are whole and keep theirs."""
        return super().is_split_at(multiple) and all(
            keeps_blocks(order, multiple) for order in self._orders if order
        )

    def arranged(self, rows: torch.Tensor, shard_id: int) -> torch.Tensor:
        """Returns the rows with their heads reordered."""
        return reorder_heads(rows, self._orders[shard_id])


class RotaryQKVLinear(QKVParallelLinear):
    """Projects to queries, keys and values whose heads are reordered for our rotation."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        rope: RopeConfig,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        super().__init__(hidden_size, head_dim, num_heads, num_kv_heads, bias=bias, group=group)
        self._order = head_order(head_dim, rope)

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether blocks of `multiple` rows are whole and keep theirs."""
        return super().is_split_at(multiple) and keeps_blocks(self._order, multiple)

    def arranged(self, rows: torch.Tensor, shard_id: int) -> torch.Tensor:
        """Returns the rows with the heads of queries and keys reordered; values do not rotate."""
        return rows if shard_id == 2 else reorder_heads(rows, self._order)


class RotaryHeadNorm(RMSNorm):
    """Normalises heads that are reordered for our rotation."""

    def __init__(self, head_dim: int, eps: float, rope: RopeConfig, *, offset: float) -> None:
        super().__init__(head_dim, eps, offset=offset)
        self._order = head_order(head_dim, rope)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the whole tensor, reordered."""
        super().weight_loader(param, reorder_heads(loaded, self._order), shard_id)
