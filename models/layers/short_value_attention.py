"""Self-attention whose values have fewer elements than its keys."""

import torch
from torch.nn import functional

from models.config import ModelConfig
from models.config_sections.heads import ValueConfig
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.rotary import Rotation
from models.layers.rotary_heads import RotaryColumnLinear, head_order
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class ShortValueAttention(SelfAttention):
    """Attention of MiMo-V2: values are scaled, and cached with zeros up to the length of keys.

    Layers with a window have sinks.

    Source: transformers 5.24, models/mimo_v2_flash.
    """

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        has_sinks = config.sliding_window(layer_index) is not None
        super().__init__(config, layer_index, group, has_sinks=has_sinks)
        values, sizes = _values(config), config.heads_of(layer_index)
        hidden, bias, num_heads = config.hidden_size, config.attention_bias, self._num_heads
        replicas = max(1, group.size // sizes.num_kv_heads)
        self._head_dim, self._value_dim, self._scale = sizes.head_dim, values.head_dim, values.scale
        self._num_heads_each = [self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads]
        # Values apart: the kernel that rotates the others takes rows of whole heads.
        del self.qkv_proj
        order = head_order(sizes.head_dim, config.rope_of(layer_index))
        self.qk_proj = RotaryColumnLinear(
            hidden,
            [count * sizes.head_dim for count in (num_heads, sizes.num_kv_heads)],
            orders=(order, order),
            replicas=(1, replicas),
            bias=bias,
            group=group,
        )
        self.v_proj = MergedColumnParallelLinear(
            hidden,
            [sizes.num_kv_heads * values.head_dim],
            replicas=[replicas],
            bias=bias,
            group=group,
        )
        self.o_proj = RowParallelLinear(
            num_heads * values.head_dim, hidden, bias=config.attention_output_bias, group=group
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        num_tokens = hidden.shape[0]
        heads = self.qk_proj(hidden).view(num_tokens, -1, self._head_dim)
        q, k = heads.split_with_sizes(self._num_heads_each, dim=-2)
        v = self.v_proj(hidden).view(num_tokens, -1, self._value_dim) * self._scale
        v = functional.pad(v, (0, self._head_dim - self._value_dim))
        attended = self.attended(q, k, v, rotation).view(num_tokens, -1, self._head_dim)
        output: torch.Tensor = self.o_proj(attended[..., : self._value_dim].flatten(-2))
        return output


def _values(config: ModelConfig) -> ValueConfig:
    if config.values is None:
        raise ValueError(f"{config.architecture} has values as long as keys")
    return config.values
