"""Attention to recent keys of tokens and to compressed keys, which are values, too."""

from typing import NamedTuple

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.compression import CompressionConfig, LayerCompression
from models.config_sections.mixers import RECENT
from models.kv_cache import RowCacheSpec
from models.layers.cache_entry import CacheEntry
from models.layers.compressor import Compressor, EntryIndexer
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.norm import RMSNorm, UnitNorm
from models.layers.rotary import Rotation, inverse_frequencies
from models.layers.weight import check_shape, empty_parameter
from models.ops.attention.compressed_attention import compressed_attention_with_output
from models.ops.elementwise.pair_rotation import turn_pairs
from models.parallel.group import SINGLE, ParallelGroup


class CompressedAttention(nn.Module):
    """Self-attention with one key of D elements for all heads, which is the value, too.

    The end of keys and queries is rotated; so is that of values, which the output is rotated back
    from. Layers that compress cache, besides what is recent, an entry for every few tokens; if
    these overlap an index chooses which ones a query attends to. Ranks share the heads; each
    computes and caches all keys.

    Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3; transformers 5.24, models/deepseek_v4.
    """

    splitting_op = "octavo::compressed_attention_with_output"
    """The operator at which a model with this layer is cut into pieces."""
    frequencies: torch.Tensor

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        sizes = compression_config(config)
        self._window, self._scale = sizes.window, sizes.head_dim**-0.5
        self._head_dim, self._group = sizes.head_dim, group
        self._num_all_heads = config.num_attention_heads
        num_heads = group.split(config.num_attention_heads, "attention heads")
        group.split(sizes.num_output_groups, "groups of heads")
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._split_sizes = [sizes.q_lora_rank, sizes.head_dim]
        # Every rank computes all of it, as a group of one.
        self.qkv_a_proj = MergedColumnParallelLinear(
            hidden, self._split_sizes, bias=False, group=SINGLE
        )
        self.q_a_norm = RMSNorm(sizes.q_lora_rank, eps)
        self.q_b_proj = MergedColumnParallelLinear(
            sizes.q_lora_rank,
            [config.num_attention_heads * sizes.head_dim],
            bias=False,
            group=group,
        )
        self.q_b_norm = UnitNorm(sizes.head_dim, eps)
        self.kv_norm = RMSNorm(sizes.head_dim, eps)
        self.sinks = empty_parameter(num_heads, dtype=torch.float32)
        self.o_a_proj = GroupedProjection(config, group)
        self.o_b_proj = RowParallelLinear(
            sizes.num_output_groups * sizes.o_lora_rank, hidden, bias=False, group=group
        )
        self.compressor: Compressor | None = None
        self.indexer: EntryIndexer | None = None
        self.entries: CacheEntry | None = None
        self._eps, self._top_k = eps, sizes.index.top_k
        self._compression: LayerCompression | None = None
        own = sizes.layers.get(layer_index)
        if own is not None:
            self._add_compressor(config, sizes, own, layer_index)
        index = config.cache_index(layer_index, *(() if own is None else (RECENT,)))
        self.recent = CacheEntry(index, RowCacheSpec(size=sizes.row_sizes(layer_index)[0]))

    def _add_compressor(
        self,
        config: ModelConfig,
        sizes: CompressionConfig,
        own: LayerCompression,
        layer_index: int,
    ) -> None:
        """Adds the modules that make and choose entries."""
        self._compression = own
        rope = config.rope_of(layer_index)
        frequencies = inverse_frequencies(sizes.rope_dim, rope)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._table_scale = rope.table_scale
        self.compressor = Compressor(config, sizes.head_dim, rate=own.rate, overlaps=own.overlaps)
        if own.overlaps:
            self.indexer = EntryIndexer(config, sizes, rate=own.rate)
        spec = RowCacheSpec(size=sizes.row_sizes(layer_index)[1], rate=own.rate)
        self.entries = CacheEntry(config.cache_index(layer_index), spec)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        compressed_q, key = self.qkv_a_proj(hidden).split(self._split_sizes, dim=-1)
        compressed_q = self.q_a_norm(compressed_q)
        q = self.q_b_proj(compressed_q).view(len(hidden), -1, self._head_dim)
        cos, sin = rotation.pairs
        q = turn_pairs(self.q_b_norm(q), cos, sin)
        rows = [turn_pairs(self.kv_norm(key), cos.squeeze(1), sin.squeeze(1))]
        index_q = index_weights = None
        if self.compressor is not None:
            rows.append(self.compressor(hidden))
        if self.indexer is not None:
            rows.append(self.indexer(hidden))
            index_q, index_weights = self.indexer.queries(hidden, compressed_q, rotation)
        attended = torch.empty_like(q)
        compressed_attention_with_output(
            q, torch.cat(rows, dim=-1), attended, self.recent.layer_index, self._window,
            self._scale, self.sinks, *self._entry_arguments(index_q, index_weights),
        )  # fmt: skip
        output: torch.Tensor = self.o_b_proj(self.o_a_proj(turn_pairs(attended, cos, -sin)))
        return output

    def _entry_arguments(
        self, index_q: torch.Tensor | None, index_weights: torch.Tensor | None
    ) -> "_EntryArguments":
        """Returns the operator's arguments about compressed entries."""
        own, compressor, entries = self._compression, self.compressor, self.entries
        if own is None or compressor is None or entries is None:
            return _EntryArguments(eps=self._eps)
        indexer = self.indexer
        return _EntryArguments(
            entries.layer_index,
            own.rate,
            own.overlaps,
            compressor.position_bias,
            compressor.kv_norm.weight,
            self._eps,
            self.frequencies,
            self._table_scale,
            index_q,
            index_weights,
            None if indexer is None else indexer.position_bias,
            None if indexer is None else indexer.kv_norm.weight,
            self._top_k,
        )

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies the sinks of this rank's heads."""
        check_shape(loaded, (self._num_all_heads,))
        param.copy_(loaded.narrow(0, self._group.rank * len(param), len(param)))


class _EntryArguments(NamedTuple):
    """Arguments of the operator; the defaults are those of a layer without compressed keys."""

    entry_layer: int = -1
    rate: int = 0
    overlaps: bool = False
    position_bias: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    frequencies: torch.Tensor | None = None
    table_scale: float = 1.0
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None
    index_bias: torch.Tensor | None = None
    index_norm: torch.Tensor | None = None
    top_k: int = 0


class GroupedProjection(nn.Module):
    """Projects each group of heads by a matrix of its own; ranks share the groups."""

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        sizes = compression_config(config)
        self._group, self._num_groups = group, sizes.num_output_groups
        self._num_local = group.split(sizes.num_output_groups, "groups of heads")
        num_inputs = config.num_attention_heads // sizes.num_output_groups * sizes.head_dim
        self.weight = empty_parameter(self._num_local * sizes.o_lora_rank, num_inputs)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Maps [T, H, D] to [T, groups * o_lora_rank]."""
        groups = heads.reshape(len(heads), self._num_local, -1).transpose(0, 1)
        weights = self.weight.view(self._num_local, -1, self.weight.shape[1])
        return torch.bmm(groups, weights.transpose(1, 2)).transpose(0, 1).flatten(1)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies the matrices of this rank's groups."""
        del shard_id
        check_shape(loaded, (len(param) * self._num_groups // self._num_local, param.shape[1]))
        param.copy_(loaded.narrow(0, self._group.rank * len(param), len(param)))


def compression_config(config: ModelConfig) -> CompressionConfig:
    """Returns a config's compressed attention.

    Raises:
        ValueError: it has none.
    """
    if config.compression is None:
        raise ValueError(f"{config.architecture} needs o_lora_rank, and its config has none")
    return config.compression
