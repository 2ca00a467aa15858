"""Self-attention whose values may be keys, and whose cache may be another layer's."""

from collections.abc import Collection

import torch

from models.config import ModelConfig
from models.config_sections.gemma4 import Gemma4Config
from models.config_sections.mixers import SHARED
from models.kv_cache import KVCacheSpec
from models.layers.linear import MergedColumnParallelLinear
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.ops.elementwise.rms_norm import rms_norm
from models.parallel.group import ParallelGroup


class SharedCacheAttention(SelfAttention):
    """Attention of Gemma 4: values are normalised, too, without a weight.

    Layers without a window may project to keys alone, which are values as well. The last layers may
    project to queries alone, and attend to what the last layer of their kind before them cached.

    Source: transformers 5.23, models/gemma4.
    """

    ones: torch.Tensor

    def __init__(self, config: ModelConfig, index: int, group: ParallelGroup) -> None:
        super().__init__(config, index, group, has_head_norms=True)
        gemma4, sizes = gemma4_config(config), config.heads_of(index)
        self._head_dim, self._eps = sizes.head_dim, config.rms_norm_eps
        hidden, bias = config.hidden_size, config.attention_bias
        self._is_sharing = config.mixer(index) == SHARED
        self._values_are_keys = gemma4.values_are_keys and config.sliding_window(index) is None
        q_size, kv_size = (
            heads * sizes.head_dim for heads in (config.num_attention_heads, sizes.num_kv_heads)
        )
        if self._is_sharing:
            del self.qkv_proj, self.k_norm
            self.cache_spec: KVCacheSpec | None = None  # type: ignore[assignment]
            self.q_proj = MergedColumnParallelLinear(hidden, [q_size], bias=bias, group=group)
            return
        self.register_buffer("ones", torch.ones(sizes.head_dim), persistent=False)
        if self._values_are_keys:
            self._num_heads_each = [self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads]
            del self.qkv_proj
            self.qk_proj = MergedColumnParallelLinear(
                hidden,
                [q_size, kv_size],
                replicas=[1, max(1, group.size // sizes.num_kv_heads)],
                bias=bias,
                group=group,
            )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        num_tokens = hidden.shape[0]
        if self._is_sharing:
            q = self.q_proj(hidden).view(num_tokens, -1, self._head_dim)
            attended = self.attn(rotation.turn(self.q_norm(q)), None, None)
        else:
            if self._values_are_keys:
                heads = self.qk_proj(hidden).view(num_tokens, -1, self._head_dim)
                q, k = heads.split_with_sizes(self._num_heads_each, dim=-2)
                v = k
            else:
                q, k, v = self.qkv_proj.forward_heads(hidden)
            attended = self.attended(q, k, rms_norm(v, self.ones, self._eps), rotation)
        output: torch.Tensor = self.o_proj(attended)
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return () if self._is_sharing else super().expected_passes()


def gemma4_config(config: ModelConfig) -> Gemma4Config:
    """Returns a config's own parts of Gemma 4.

    Raises:
        ValueError: it has none.
    """
    if config.gemma4 is None:
        raise ValueError(f"{config.architecture} is no Gemma 4")
    return config.gemma4
