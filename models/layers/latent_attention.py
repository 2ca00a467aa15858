"""Multi-head latent attention: caches one small vector per token for all heads."""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.mla import MlaConfig
from models.kv_cache import LatentCacheSpec
from models.layers.indexer import Indexer
from models.layers.linear import RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.rotary_heads import RotaryColumnLinear, head_order
from models.layers.weight import check_shape, empty_parameter
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support
from models.ops.attention.latent_attention import latent_attention_with_output
from models.parallel.group import SINGLE, ParallelGroup

_Index = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]
"""Queries, keys, weights and top_k of an index."""


class LatentAttention(nn.Module):
    """Self-attention whose keys and values are projections of a cached latent vector.

    The attention operator applies these projections. For few queries of a sequence it applies the
    one to keys to queries, and the one to values to the attended vectors, so that all heads attend
    to the latent vectors themselves, with C + P elements per score and values of C. For many it
    applies them to the latent vectors. With an indexer, each query attends to the tokens that it
    chooses; some layers share the choice of an earlier one. Heads may have sinks then, learned
    scores in the softmax without a key. Ranks share the heads; each computes and caches the latent
    vector.
    Of each of H heads N elements are not rotated and P are; C elements of the latent vector, V of a
    value.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C.
    """

    splitting_op = "octavo::latent_attention_with_output"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        mla = _mla_config(config)
        self._mla = mla
        self._rotates = layer_index not in config.unrotated_layers
        self.layer_index = config.cache_index(layer_index)
        head_size = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self._scale = head_size**-0.5 * config.rope.score_scale
        num_heads = config.num_attention_heads
        self._num_heads = group.split(num_heads, "attention heads")
        q_order, kv_order = (
            head_order(mla.qk_rope_head_dim, config.rope, num_unrotated=size)
            for size in (mla.qk_nope_head_dim, mla.kv_lora_rank)
        )
        hidden, q_size, kv_size = config.hidden_size, num_heads * head_size, len(kv_order)
        if mla.q_lora_rank is None:
            self.q_proj = RotaryColumnLinear(
                hidden, [q_size], orders=[q_order], bias=False, group=group
            )
            # Every rank computes all of it, as a group of one.
            self.kv_a_proj_with_mqa = RotaryColumnLinear(
                hidden, [kv_size], orders=[kv_order], bias=config.attention_bias, group=SINGLE
            )
        else:
            self.qkv_a_proj = RotaryColumnLinear(
                hidden,
                [mla.q_lora_rank, kv_size],
                orders=[(), kv_order],
                bias=config.attention_bias,
                group=SINGLE,
            )
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, mla.norm_eps)
            self.q_b_proj = RotaryColumnLinear(
                mla.q_lora_rank, [q_size], orders=[q_order], bias=False, group=group
            )
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, mla.norm_eps)
        self.kv_b_proj = LatentProjections(num_heads, mla, group)
        self._group = group
        self.sinks = (
            empty_parameter(self._num_heads, dtype=torch.float32) if mla.has_sinks else None
        )
        self.o_proj = RowParallelLinear(
            num_heads * mla.v_head_dim, hidden, bias=config.attention_output_bias, group=group
        )
        self._shares_choice = mla.index is not None and layer_index in mla.index.sharing_layers
        if self._shares_choice and layer_index == _first_layer(config, group):
            raise ValueError(
                f"layer {layer_index} attends to what the indexer of an earlier one chose, which "
                "another pipeline stage has: choose others with --pipeline-layers"
            )
        has_indexer = mla.index is not None and not self._shares_choice
        self.indexer = Indexer(config, mla, mla.index) if mla.index and has_indexer else None
        self.cache_spec = LatentCacheSpec(
            num_heads=self._num_heads,
            latent_dim=mla.kv_lora_rank,
            rope_dim=mla.qk_rope_head_dim,
            index_dim=mla.index.head_dim if mla.index and has_indexer else 0,
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        output: torch.Tensor = self.o_proj(self.attended(hidden, rotation).flatten(1))
        return output

    def attended(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to attended values, [T, H, V]."""
        mla = self._mla
        queries, compressed, compressed_q = self._project(hidden)
        q_plain, q_rotated = torch.split(
            rotation.scale(queries.view(hidden.shape[0], self._num_heads, -1)),
            [mla.qk_nope_head_dim, mla.qk_rope_head_dim],
            dim=-1,
        )
        latent, k_rotated = torch.split(
            compressed, [mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1
        )
        latent = self.kv_a_layernorm(latent)
        k_rotated = k_rotated.unsqueeze(1)
        if self._rotates:
            k_rotated, q_rotated = rotation.turn(k_rotated), rotation.turn(q_rotated)
        else:
            k_rotated, q_rotated = k_rotated.contiguous(), q_rotated.contiguous()
        index: _Index = (None, None, None, 0)
        if self.indexer is not None:
            index = self.indexer(hidden, compressed_q, rotation)
        elif self._shares_choice and mla.index is not None:
            index = None, None, None, mla.index.top_k
        attended = queries.new_empty(*q_plain.shape[:2], mla.v_head_dim)
        latent_attention_with_output(
            q_plain, q_rotated, latent, k_rotated, self.kv_b_proj.weight, attended,
            self.layer_index, self._scale, *index, self.sinks,
        )  # fmt: skip
        return attended

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return {"qk_norm_rope_cache"} if self._rotates else ()

    def cudagraph_support(
        self, device: torch.device, cache_dtype: torch.dtype
    ) -> AttentionCGSupport:
        """Returns the steps whose graphs may contain this layer."""
        del cache_dtype
        return attention_cudagraph_support(device, caches_new_keys=True)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies the sinks of this rank's heads."""
        del shard_id
        check_shape(loaded, (self._num_heads * self._group.size,))
        param.copy_(loaded.narrow(0, self._group.rank * len(param), len(param)))

    def _project(
        self, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns queries [T, H * (N + P)] and the compressed keys and values [T, C + P].

        The third are compressed queries, normalised, [T, q_lora_rank], or None.
        """
        mla = self._mla
        if mla.q_lora_rank is None:
            return self.q_proj(hidden), self.kv_a_proj_with_mqa(hidden), None
        sizes = [mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim]
        compressed_q, compressed = torch.split(self.qkv_a_proj(hidden), sizes, dim=-1)
        compressed_q = self.q_a_layernorm(compressed_q)
        return self.q_b_proj(compressed_q), compressed, compressed_q


class LatentProjections(nn.Module):
    """The projections of the latent vector to each head's key and value, head by head."""

    def __init__(self, num_heads: int, mla: MlaConfig, group: ParallelGroup) -> None:
        super().__init__()
        self._group = group
        self._num_rows = num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        num_rows = group.split(num_heads, "attention heads") * (self._num_rows // num_heads)
        self.weight = empty_parameter(num_rows, mla.kv_lora_rank)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies the rows of this rank's heads."""
        check_shape(loaded, (self._num_rows, param.shape[1]))
        param.copy_(loaded.narrow(0, self._group.rank * len(param), len(param)))


def _first_layer(config: ModelConfig, group: ParallelGroup) -> int:
    return group.stage.layers_of(config.num_hidden_layers).start


def _mla_config(config: ModelConfig) -> MlaConfig:
    """Returns a config's latent attention.

    Raises:
        ValueError: it has none.
    """
    if config.mla is None:
        raise ValueError(f"{config.architecture} needs kv_lora_rank, and its config has none")
    return config.mla
