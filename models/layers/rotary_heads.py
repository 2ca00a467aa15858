"""Reorders the elements of heads for our rotation, while weights are loaded.

Families differ in which elements of a head form a pair, and in whether all are rotated. Reordering
the elements of both queries and keys does not change their products. So the rows of the projections
are reordered once, and kernels always rotate (i, i + D / 2), with angle 0 for elements that are not
rotated.
"""

from collections.abc import Sequence

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
    rest = list(range(size, head_dim))
    middle = len(rest) // 2
    order = [*first, *rest[:middle], *second, *rest[middle:]]
    return [*range(num_unrotated), *(num_unrotated + index for index in order)]


def reorder_heads(loaded: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Reorders the rows of every head: of a weight, a bias, or a head's norm."""
    if list(order) == sorted(order):
        return loaded
    heads = loaded.view(-1, len(order), *loaded.shape[1:])
    return heads[:, list(order)].flatten(0, 1)


class RotaryColumnLinear(MergedColumnParallelLinear):
    """Projections whose heads are reordered for our rotation.

    orders: of the heads of each projection; an empty one keeps it.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        orders: Sequence[Sequence[int]],
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        super().__init__(input_size, output_sizes, bias=bias, group=group)
        self._orders = orders

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's rows of one projection, reordered."""
        # Block scales are fewer than rows; a block holds whole heads or is part of one.
        if len(loaded) == self.output_sizes[shard_id]:
            loaded = reorder_heads(loaded, self._orders[shard_id])
        super().weight_loader(param, loaded, shard_id)


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

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's rows of one projection; reorders those of queries and keys."""
        # As in RotaryColumnLinear; values, the third, do not rotate.
        has_all_rows = len(loaded) == self.output_sizes[shard_id]
        if has_all_rows and shard_id != 2:
            loaded = reorder_heads(loaded, self._order)
        super().weight_loader(param, loaded, shard_id)


class RotaryHeadNorm(RMSNorm):
    """Normalises heads that are reordered for our rotation."""

    def __init__(self, head_dim: int, eps: float, rope: RopeConfig, *, offset: float) -> None:
        super().__init__(head_dim, eps, offset=offset)
        self._order = head_order(head_dim, rope)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the whole tensor, reordered."""
        super().weight_loader(param, reorder_heads(loaded, self._order), shard_id)
