"""Gemma 2 and the text part of Gemma 3: norms before and after both sub-layers.

Norms add one to their weights, the gate is a gelu, and token vectors are scaled. Layers with a
window alternate with others. Gemma 2 caps attention scores and logits softly; Gemma 3 normalises
heads instead, and layers with a window have a rotation of their own.
Source: Gemma Team 2024, "Gemma 2", section 2; Gemma Team 2025, "Gemma 3 Technical Report",
section 2.
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.sandwich_norm_layer import SandwichNormLayer
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return SandwichNormLayer(config, SelfAttention(config, index, group), group)


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return SandwichNormLayer(
            config, SelfAttention(config, index, group, has_head_norms=True), group
        )
