"""Mixers that keep a state, and their parts."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from models.layers.linear import MergedColumnParallelLinear
from models.layers.weight import ShardId, check_shape, empty_parameter
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support
from models.ops.elementwise.gated_rms_norm import gated_rms_norm
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.group import ParallelGroup
from models.state_cache import StateSpec


class StateMixer(nn.Module):
    """A layer's mixer of tokens that keeps a state of each request.

    Its operator finds metadata and states in the forward context.

    layer_index: number of the cache entry. cache_spec: sizes of the state on one rank.
    """

    def __init__(self, cache_index: int, cache_spec: StateSpec, group: ParallelGroup) -> None:
        super().__init__()
        self.layer_index = cache_index
        self.cache_spec = cache_spec
        self._group = group

    def cudagraph_support(
        self, device: torch.device, cache_dtype: torch.dtype
    ) -> AttentionCGSupport:
        """Returns the steps whose graphs may contain this layer."""
        del cache_dtype
        return attention_cudagraph_support(device)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the values of this rank's heads; stored dimensions of one element may differ."""
        del shard_id
        size = param.numel() * self._group.size
        if loaded.numel() != size:
            check_shape(loaded, (size,))
        share = loaded.reshape(size).narrow(0, self._group.rank * param.numel(), param.numel())
        param.copy_(share.view(param.shape))


class CausalConv(nn.Module):
    """The weights of a causal convolution of each channel.

    Ranks share every part of the channels; replicas: as in MergedColumnParallelLinear. weight:
    [channels, width]. Shard ids: parts, if a checkpoint stores each by itself.
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        width: int,
        *,
        replicas: Sequence[int] | None = None,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        super().__init__()
        replicas = replicas or [1] * len(part_sizes)
        self._shares = tuple(group.rank // count for count in replicas)
        self._sizes = tuple(part_sizes)
        self._local_sizes = tuple(
            group.split(size, "channels", replicas=count)
            for size, count in zip(part_sizes, replicas, strict=True)
        )
        self.weight = empty_parameter(sum(self._local_sizes), width)
        self.bias = empty_parameter(sum(self._local_sizes)) if bias else None

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's channels of one part, or of a tensor that holds all."""
        if len(loaded) == sum(self._sizes) and len(self._sizes) > 1:
            for index, part in enumerate(torch.split(loaded, list(self._sizes))):
                self.weight_loader(param, part, index)
            return
        if loaded.dim() == param.dim() + 1:
            loaded = loaded.squeeze(1)  # torch keeps a channel's inputs from one channel
        check_shape(loaded, (self._sizes[shard_id], *param.shape[1:]))
        size = self._local_sizes[shard_id]
        target = param.narrow(0, sum(self._local_sizes[:shard_id]), size)
        target.copy_(loaded.narrow(0, self._shares[shard_id] * size, size))


class JoinedColumnLinear(MergedColumnParallelLinear):
    """Several projections of one input, of which a checkpoint's tensor may hold some together.

    stored: the projections of each stored tensor; shard ids are indices of it.
    num_interleaved: heads of which each stores its rows of all projections together; 0: each
        projection has its rows together.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        stored: Sequence[Sequence[int]],
        num_interleaved: int = 0,
        bias: bool = False,
        group: ParallelGroup,
    ) -> None:
        super().__init__(input_size, output_sizes, bias=bias, group=group)
        self._stored = stored
        self._num_interleaved = num_interleaved

    def parts_of(self, shard_id: ShardId, num_rows: int) -> Sequence[int]:
        """Returns the projections that a stored tensor holds."""
        del num_rows
        assert isinstance(shard_id, int), "only experts are numbered"
        return self._stored[shard_id]

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether shards, projections and their heads begin at multiples of `multiple`."""
        heads = self._num_interleaved or 1
        is_whole = not any(size // heads % multiple for size in self.output_sizes)
        return super().is_split_at(multiple) and (is_whole or not self._num_interleaved)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's rows of the projections in one stored tensor."""
        if param is self.weight_order:
            super().weight_loader(param, loaded, shard_id)
            return
        block = (self.method.block or 1) if param is self.weight_scale else 1
        parts = self._stored[shard_id]
        sizes = [-(-self.output_sizes[part] // block) for part in parts]
        check_shape(loaded, (sum(sizes), *param.shape[1:]))
        heads = self._num_interleaved or 1
        by_head = loaded.reshape(heads, -1, *loaded.shape[1:])
        pieces = torch.split(by_head, [size // heads for size in sizes], dim=1)
        for part, rows in zip(parts, pieces, strict=True):
            super().weight_loader(param, rows.flatten(0, 1), part)


class GatedRMSNorm(nn.Module):
    """A norm of groups of elements, beside a gate.

    num_groups: groups with weights of their own; ranks share them, or the elements of a single
        one. 0: all groups share one weight.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        group: ParallelGroup,
        *,
        num_groups: int = 0,
        has_silu: bool = True,
        gates_first: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._group = group
        self._has_silu = has_silu
        self._gates_first = gates_first
        self._size = size
        self._is_shared = num_groups == 1 and group.size > 1
        if self._is_shared:
            self.weight = empty_parameter(1, group.split(size, "elements of a norm"))
        elif num_groups:
            self.weight = empty_parameter(group.split(num_groups, "groups of a norm"), size)
        else:
            self.weight = empty_parameter(size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Maps x and gate, [T, K] each, to [T, K]."""
        if not self._is_shared:
            return gated_rms_norm(x, gate, self.weight, self.eps, self._has_silu, self._gates_first)
        values, factors = x.float(), functional.silu(gate.float())
        if self._gates_first:
            values = values * factors
        squares = all_reduce(values.square().sum(-1, keepdim=True), self._group.name)
        values = values * torch.rsqrt(squares / self._size + self.eps) * self.weight.float()
        return (values if self._gates_first else values * factors).to(x.dtype)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the weight that all share, or the weights of this rank's groups."""
        del shard_id
        ranks = self._group.size if param.dim() > 1 else 1
        check_shape(loaded, (param.numel() * ranks,))
        first = self._group.rank * param.numel() if param.dim() > 1 else 0
        param.copy_(loaded.narrow(0, first, param.numel()).view(param.shape))
