"""Linear layers whose weights are shared out over the ranks of a group.

A column-parallel layer splits its outputs, a row-parallel layer its inputs; one after the other
they need a single all-reduce (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from models.layers.weight import check_shape, empty_parameter
from models.parallel.group import ParallelGroup


class MergedColumnParallelLinear(nn.Module):
    """Several projections of one input in one matrix product, outputs split over the ranks.

    Its output is this rank's share of each projection, one after the other. Shard ids number the
    projections.

    Args:
        input_size: features of the input.
        output_sizes: features of each projection, over all ranks.
        replicas: for each projection, how many neighbouring ranks hold the same share.
        bias: whether there is one.
        group: the ranks that share the layer.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        replicas: Sequence[int] | None = None,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        super().__init__()
        replicas = replicas or [1] * len(output_sizes)
        self.output_sizes = tuple(output_sizes)
        self.local_sizes = tuple(
            group.split(size, "output features", replicas=count)
            for size, count in zip(output_sizes, replicas, strict=True)
        )
        self._shares = tuple(group.rank // count for count in replicas)
        self.weight = empty_parameter(sum(self.local_sizes), input_size)
        self.bias = empty_parameter(sum(self.local_sizes)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, input_size] to [T, sum of local_sizes]."""
        return functional.linear(x, self.weight, self.bias)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's rows of one projection's weight or bias."""
        check_shape(loaded, (self.output_sizes[shard_id], *param.shape[1:]))
        size = self.local_sizes[shard_id]
        target = param.narrow(0, sum(self.local_sizes[:shard_id]), size)
        target.copy_(loaded.narrow(0, self._shares[shard_id] * size, size))


class QKVParallelLinear(MergedColumnParallelLinear):
    """Queries, keys and values of attention, whole heads split over the ranks.

    With more ranks than kv heads, neighbouring ranks hold the same kv head. Shard ids: 0 for the
    queries, 1 for the keys, 2 for the values.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        kv_replicas = max(1, group.size // num_kv_heads)
        self.num_heads = group.split(num_heads, "attention heads")
        self.num_kv_heads = group.split(num_kv_heads, "kv heads", replicas=kv_replicas)
        super().__init__(
            hidden_size,
            [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim],
            replicas=[1, kv_replicas, kv_replicas],
            bias=bias,
            group=group,
        )
        self._head_dim = head_dim

    def forward_heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maps [T, hidden] to this rank's q [T, Hq, D], k and v [T, Hk, D]."""
        heads = self(x).view(x.shape[0], -1, self._head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        return q, k, v


class RowParallelLinear(nn.Module):
    """A projection whose inputs are split over the ranks; every rank gets the whole output."""

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, group: ParallelGroup
    ) -> None:
        super().__init__()
        self._group = group
        self._input_size = input_size
        self.weight = empty_parameter(output_size, group.split(input_size, "input features"))
        self.bias = empty_parameter(output_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps this rank's [T, input_size / ranks] to the whole [T, output_size]."""
        if self._group.size == 1:
            return functional.linear(x, self.weight, self.bias)
        # The bias joins after the sum, or it would be counted once per rank.
        output = self._group.all_reduce(functional.linear(x, self.weight))
        return output if self.bias is None else output + self.bias

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's columns of the weight, or the whole bias."""
        if param is self.bias:
            check_shape(loaded, tuple(param.shape))
            param.copy_(loaded)
            return
        rows, columns = param.shape
        check_shape(loaded, (rows, self._input_size))
        param.copy_(loaded.narrow(1, self._group.rank * columns, columns))
