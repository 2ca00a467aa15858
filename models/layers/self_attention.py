"""Self-attention with its projections and the variants of families."""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.kv_cache import KVCacheSpec
from models.layers.attention import Attention
from models.layers.linear import QKVParallelLinear, RowParallelLinear
from models.layers.norm import UnitNorm
from models.layers.rotary import Rotation
from models.layers.rotary_heads import RotaryHeadNorm, RotaryQKVLinear
from models.layers.weight import check_shape, empty_parameter
from models.parallel.group import ParallelGroup


class SelfAttention(nn.Module):
    """Self-attention with rotary positions or none, several query heads to one kv head.

    has_head_norms: whether each query and key head is normalised before it is rotated; a rotation
        keeps lengths, so norms without weights may as well come after it.
    has_norm_weights: whether these norms have weights.
    has_sinks: whether each head has a sink, a learned score in the softmax without a key.

    Source: Ainslie et al. 2023, "GQA"; Xiao et al. 2023, "Efficient Streaming Language Models with
    Attention Sinks".
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        has_head_norms: bool = False,
        has_norm_weights: bool = True,
        has_sinks: bool = False,
    ) -> None:
        super().__init__()
        self._group = group
        self._num_heads = config.num_attention_heads
        sizes = config.heads_of(layer_index)
        self.qkv_proj: QKVParallelLinear = RotaryQKVLinear(
            config.hidden_size,
            sizes.head_dim,
            config.num_attention_heads,
            sizes.num_kv_heads,
            rope=config.rope_of(layer_index),
            bias=config.attention_bias,
            group=group,
        )
        self._has_head_norms = has_head_norms
        if has_head_norms:
            make_norm = _head_norm if has_norm_weights else _unit_norm
            self.q_norm: nn.Module = make_norm(config, layer_index)
            self.k_norm: nn.Module = make_norm(config, layer_index)
        self.sinks = empty_parameter(self.qkv_proj.num_heads) if has_sinks else None
        self._rotates = layer_index not in config.unrotated_layers
        query_scale = config.rope_of(layer_index).query_scale
        is_of_others = query_scale is not None and query_scale.is_of_unrotated and self._rotates
        self._scales_queries = not is_of_others
        self.attn = Attention(
            config.cache_index(layer_index),
            sliding_window=config.sliding_window(layer_index),
            scale=config.multipliers.attention,
            soft_cap=config.multipliers.attention_cap,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * sizes.head_dim,
            config.hidden_size,
            bias=config.attention_output_bias,
            group=group,
        )
        self.cache_spec = KVCacheSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=sizes.head_dim,
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        q, k, v = self.qkv_proj.forward_heads(hidden)
        output: torch.Tensor = self.o_proj(self.attended(q, k, v, rotation))
        return output

    def attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Maps q [T, Hq, D], k and v [T, Hk, D], as projected, to attended values [T, Hq * D]."""
        q, k = self.normalized(q, k)
        if self._scales_queries:
            q = rotation.scale(q)
        if self._rotates:
            q, k = rotation.turn(q), rotation.turn(k)
        else:
            q = q.contiguous()
        values: torch.Tensor = self.attn(q, k, v, sinks=self.sinks)
        return values

    def normalized(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q [T, Hq, D] and k [T, Hk, D], normalised if the family does that."""
        return (self.q_norm(q), self.k_norm(k)) if self._has_head_norms else (q, k)

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return {"qk_norm_rope_cache"} if self._rotates else ()

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies the sinks of this rank's heads."""
        check_shape(loaded, (self._num_heads,))
        param.copy_(loaded.narrow(0, self._group.rank * len(param), len(param)))


def _head_norm(config: ModelConfig, layer_index: int) -> RotaryHeadNorm:
    head_dim, rope = config.heads_of(layer_index).head_dim, config.rope_of(layer_index)
    return RotaryHeadNorm(head_dim, config.rms_norm_eps, rope, offset=config.norm_offset)


def _unit_norm(config: ModelConfig, layer_index: int) -> UnitNorm:
    return UnitNorm(config.heads_of(layer_index).head_dim, config.rms_norm_eps)
