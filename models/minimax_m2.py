"""MiniMax-M2: queries and keys normalised over all heads, and experts in all layers.

Experts are chosen by sigmoid scores with a correction bias; part of each head is rotated.
Source: transformers 5.23, models/minimax_m2.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.projection_norm import ProjectionNormAttention
from models.parallel.group import ParallelGroup


class MiniMaxM2ForCausalLM(CausalLM):
    """MiniMax-M2 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".block_sparse_moe.": ".mlp.",
    }
    expert_names: ClassVar[tuple[str, str, str] | None] = ("w1", "w3", "w2")

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        return ProjectionNormAttention(config, index, group)
