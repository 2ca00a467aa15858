"""Self-attention whose queries attend to the blocks of keys that an index chooses."""

from collections.abc import Collection
from dataclasses import replace

import torch

from models.config import ModelConfig
from models.config_sections.block_index import BlockIndexConfig
from models.layers.cache_entry import CacheEntry
from models.layers.rotary import Rotation
from models.layers.rotary_heads import RotaryColumnLinear, RotaryHeadNorm, head_order
from models.layers.self_attention import SelfAttention
from models.ops.attention.block_sparse_attention import block_sparse_attention_with_output
from models.parallel.group import ParallelGroup


class BlockSparseAttention(SelfAttention):
    """Attention with normalised heads to chosen blocks of keys.

    The index has a query head for each kv head and one key for all, which are normalised and
    rotated as those of attention. Ranks share its query heads as they share the kv heads; each
    computes and caches all of its keys.

    Source: transformers 5.24, models/minimax_m3_vl.
    """

    splitting_op = "octavo::block_sparse_attention_with_output"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__(config, layer_index, group, has_head_norms=True)
        index = _index_config(config)
        sizes, rope = config.heads_of(layer_index), config.rope_of(layer_index)
        self._head_dim, self._index = sizes.head_dim, index
        self._scale = sizes.head_dim**-0.5
        order = head_order(sizes.head_dim, rope)
        self.index_qk_proj = RotaryColumnLinear(
            config.hidden_size,
            [sizes.num_kv_heads * sizes.head_dim, sizes.head_dim],
            orders=(order, order),
            replicas=(max(1, group.size // sizes.num_kv_heads), group.size),
            bias=False,
            group=group,
        )
        self.index_q_norm, self.index_k_norm = (
            RotaryHeadNorm(sizes.head_dim, config.rms_norm_eps, rope, offset=config.norm_offset)
            for _ in range(2)
        )
        spec = replace(self.cache_spec, index_dim=sizes.head_dim)
        del self.attn, self.cache_spec
        self.entry = CacheEntry(config.cache_index(layer_index), spec)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        q, k, v = self.qkv_proj.forward_heads(hidden)
        q, k = self.normalized(q, k)
        q, k = rotation.turn(rotation.scale(q)), rotation.turn(k)
        heads = self.index_qk_proj(hidden).unflatten(-1, (-1, self._head_dim))
        index_q = rotation.turn(self.index_q_norm(heads[:, :-1]))
        index_k = rotation.turn(self.index_k_norm(heads[:, -1:])).squeeze(1)
        index, attended = self._index, torch.empty_like(q)
        block_sparse_attention_with_output(
            q, k, v, attended, self.entry.layer_index, index_q, index_k, index.block_size,
            index.top_blocks, index.local_blocks, self._scale,
        )  # fmt: skip
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns none: the operator takes heads that are normalised and rotated."""
        return ()


def _index_config(config: ModelConfig) -> BlockIndexConfig:
    """Returns a config's index of blocks.

    Raises:
        ValueError: it has none.
    """
    if config.block_index is None:
        raise ValueError(f"{config.architecture} needs layers that choose blocks, and has none")
    return config.block_index
