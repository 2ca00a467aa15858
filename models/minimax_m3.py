"""MiniMax M3: layers that attend to chosen blocks of keys, and clamped experts beside a shared one.

Draft layers of released checkpoints are passed over.
Source: transformers 5.24, models/minimax_m3_vl.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.block_sparse_attention import BlockSparseAttention
from models.layers.decoder import CausalLM
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class MiniMaxM3VLForCausalLM(CausalLM):
    """The text part of MiniMax M3 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "index_qk_proj": ("index_q_proj", "index_k_proj"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".block_sparse_moe.": ".mlp.",
        ".self_attn.indexer.": ".self_attn.index_",
    }
    unused_parts: ClassVar[tuple[str, ...]] = ("mtp.", "model.mtp.")
    expert_names: ClassVar[tuple[str, str, str] | None] = ("w1", "w3", "w2")

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        if config.block_index is not None and index in config.block_index.layers:
            return BlockSparseAttention(config, index, group)
        return SelfAttention(config, index, group, has_head_norms=True)
