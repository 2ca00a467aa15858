"""Linear layers whose weights are split over the ranks of a group.

A column-parallel layer splits its outputs, a row-parallel layer its inputs; in sequence they need a
single all-reduce (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from collections.abc import Sequence

import torch
from torch import nn

from models.layers.quantization import QuantizableLinear
from models.layers.weight import ShardId, check_shape, empty_parameter
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.group import ParallelGroup


class MergedColumnParallelLinear(QuantizableLinear):
    """Several projections of one input in one matrix product, outputs split over the ranks.

    Its output concatenates this rank's share of each projection. Shard ids are indices of the
    projections. replicas: for each projection, how many neighbouring ranks hold the same share.
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
        self._input_size = input_size
        self.weight = empty_parameter(sum(self.local_sizes), input_size)
        self.bias = empty_parameter(sum(self.local_sizes)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, input_size] to [T, sum of local_sizes]."""
        return self.product(x, self.bias)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """This rank's outputs of each projection in the layer."""
        return self.local_sizes

    @property
    def num_inputs(self) -> int:
        """All inputs."""
        return self._input_size

    def parts_of(self, shard_id: ShardId, num_rows: int) -> Sequence[int]:
        """Returns the projections that a stored tensor of `num_rows` rows holds: one, or all."""
        assert isinstance(shard_id, int), "only experts are numbered"
        is_of_all = num_rows == sum(self.output_sizes)
        return range(len(self.output_sizes)) if is_of_all else (shard_id,)

    def local_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values for each input, [n, input_size], as they are: each rank has all inputs."""
        check_shape(values, (len(values), self._input_size))
        return values

    @property
    def has_all_inputs(self) -> bool:
        """Whether the layer multiplies all inputs: each rank does."""
        return True

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether projections begin at multiples of `multiple` features, and shards do.

        Shards of a last projection of at most as many features are in one multiple.
        """
        *sizes, last = self.local_sizes
        is_whole = self.local_sizes == self.output_sizes or self.output_sizes[-1] <= multiple
        return not any(size % multiple for size in sizes) and (is_whole or last % multiple == 0)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's rows of one projection's weight, scales or bias.

        A tensor that holds all projections, one after another, is cut and copied as several.
        """
        if param is self.weight_order:
            check_shape(loaded, tuple(param.shape))
            param.copy_(loaded)  # the same for all projections
            return
        block = (self.method.block or 1) if param is self.weight_scale else 1
        whole_sizes = [-(-size // block) for size in self.output_sizes]
        if len(whole_sizes) > 1 and len(loaded) == sum(whole_sizes):
            for index, part in enumerate(torch.split(loaded, whole_sizes)):
                self.weight_loader(param, part, index)
            return
        check_shape(loaded, (-(-self.output_sizes[shard_id] // block), *param.shape[1:]))
        sizes = [-(-size // block) for size in self.local_sizes]
        target = param.narrow(0, sum(sizes[:shard_id]), sizes[shard_id])
        first = self._shares[shard_id] * self.local_sizes[shard_id] // block
        own = loaded.narrow(0, first, sizes[shard_id])
        if block == 1:
            own = self.arranged(own, shard_id)
        else:
            own = self.arranged_scales(own, shard_id, block)
        target.copy_(own)

    def arranged(self, rows: torch.Tensor, shard_id: int) -> torch.Tensor:
        """Returns this rank's rows of one projection, scales or bias in our order."""
        del shard_id
        return rows

    def arranged_scales(self, scales: torch.Tensor, shard_id: int, block: int) -> torch.Tensor:
        """Returns the scales of one projection's blocks, of `block` rows each, in our order."""
        del shard_id, block
        return scales


class QKVParallelLinear(MergedColumnParallelLinear):
    """Queries, keys and values of attention, whole heads split over the ranks.

    With more ranks than kv heads, neighbouring ranks hold the same kv head. Shard ids: 0, 1 and 2
    for queries, keys and values.
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
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = heads.split_with_sizes(sizes, dim=-2)
        return q, k, v


class RowParallelLinear(QuantizableLinear):
    """A projection whose inputs are split over the ranks; every rank gets the whole output.

    Without `is_reduced`, each rank gets a part instead; the sum of all parts is the output.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        group: ParallelGroup,
        is_reduced: bool = True,
    ) -> None:
        super().__init__()
        self._group = group
        self._is_reduced = is_reduced
        self._input_size = input_size
        self.weight = empty_parameter(output_size, group.split(input_size, "input features"))
        self.bias = empty_parameter(output_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps this rank's [T, input_size / ranks] to [T, output_size]."""
        # One rank adds the bias, or it would count once per rank.
        bias = self.bias if self._group.rank == 0 else None
        product = self.product(x, bias)
        if self._group.size == 1 or not self._is_reduced:
            return product
        return all_reduce(product, self._group.name)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """All outputs, of one projection."""
        return (self.weight.shape[0],)

    @property
    def num_inputs(self) -> int:
        """This rank's inputs."""
        return self._group.split(self._input_size, "input features")

    def parts_of(self, shard_id: ShardId, num_rows: int) -> Sequence[int]:
        """Returns the one projection."""
        del shard_id, num_rows
        return (0,)

    def local_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of values for each input, [n, input_size / ranks]."""
        check_shape(values, (len(values), self._input_size))
        return values.narrow(1, self._group.rank * self.num_inputs, self.num_inputs)

    @property
    def is_summed(self) -> bool:
        """Whether the output is a sum over ranks."""
        return self._group.size > 1 and self._is_reduced

    @property
    def is_one_product(self) -> bool:
        """Whether the output is one product, not a sum over ranks."""
        return self._group.size == 1

    @property
    def has_all_inputs(self) -> bool:
        """Whether the layer multiplies all inputs, not one rank's share."""
        return self._group.size == 1

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether shards begin at multiples of `multiple` features."""
        columns = self.weight.shape[1]
        return columns == self._input_size or columns % multiple == 0

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's columns of the weight and of its scales; what has no columns whole."""
        covered = self.columns_per_entry(param)
        if covered is None:
            check_shape(loaded, tuple(param.shape))
            param.copy_(loaded)
            return
        rows, columns = param.shape
        check_shape(loaded, (rows, -(-self._input_size // covered)))
        param.copy_(loaded.narrow(1, self._group.rank * columns, columns))
