"""Self-attention whose queries, and whose keys, are normalised over all heads together.

Source: OLMo Team 2024, "2 OLMo 2 Furious", section 3.3.
"""

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.rope import RopeConfig
from models.layers.rotary_heads import head_order, reorder_heads
from models.layers.self_attention import SelfAttention
from models.layers.weight import check_shape, empty_parameter
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.group import ParallelGroup


class ProjectionNorm(nn.Module):
    """Divides by the root mean square of all heads and scales each element.

    rope: of heads that are rotated afterwards.

    With more ranks than heads, neighbouring ranks hold the same head.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        group: ParallelGroup,
        rope: RopeConfig | None = None,
    ) -> None:
        super().__init__()
        self._group, self._eps = group, eps
        self._order = range(head_dim) if rope is None else head_order(head_dim, rope)
        self._size = num_heads * head_dim
        self._replicas = max(1, group.size // num_heads)
        num_local = group.split(num_heads, "heads", replicas=self._replicas)
        self.weight = empty_parameter(num_local * head_dim)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Maps this rank's heads, [T, H, D], to normalised ones."""
        x = heads.flatten(1)
        if self._group.size == 1:
            return rms_norm(x, self.weight, self._eps).view(heads.shape)
        squares = all_reduce(x.float().square().sum(-1, keepdim=True), self._group.name)
        scale = torch.rsqrt(squares / (self._size * self._replicas) + self._eps)
        return (x.float() * scale * self.weight.float()).to(x.dtype).view(heads.shape)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies the weights of this rank's heads, reordered for our rotation."""
        check_shape(loaded, (self._size,))
        loaded = reorder_heads(loaded, self._order)
        first = self._group.rank // self._replicas * len(param)
        param.copy_(loaded.narrow(0, first, len(param)))


class ProjectionNormAttention(SelfAttention):
    """Self-attention whose queries, and whose keys, are normalised over all heads."""

    def __init__(self, config: ModelConfig, index: int, group: ParallelGroup) -> None:
        super().__init__(config, index, group)
        self.q_norm, self.k_norm = (
            ProjectionNorm(heads, config.head_dim, config.rms_norm_eps, group, config.rope)
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )

    def normalized(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normalised q [T, Hq, D] and k [T, Hk, D]."""
        return self.q_norm(q), self.k_norm(k)
