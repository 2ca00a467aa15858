"""Gemma 2 and the text part of Gemma 3: norms before and after both sub-layers.

Norms add one to their weights, the gate is a gelu, and token vectors are scaled. Layers with a
window alternate with others. Gemma 2 caps attention scores and logits softly; Gemma 3 normalises
heads instead, and layers with a window have a rotation of their own.
Source: Gemma Team 2024, "Gemma 2", section 2; Gemma Team 2025, "Gemma 3 Technical Report",
section 2.
"""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.gated_mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class GemmaLayer(nn.Module):
    """Attention and feed-forward, each between two norms and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, group: ParallelGroup, *, has_head_norms: bool
    ) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.self_attn = SelfAttention(config, index, group, has_head_norms=has_head_norms)
        self.mlp = GatedMLP(config, group)
        self.input_layernorm = RMSNorm(size, eps, offset=offset)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=offset)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, offset=offset)
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=offset)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with both outputs added."""
        attended = self.self_attn(self.input_layernorm(hidden), rotation)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        output: torch.Tensor = hidden + self.post_feedforward_layernorm(fed)
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        return {"residual_norm"}


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return GemmaLayer(config, index, group, has_head_norms=False)


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return GemmaLayer(config, index, group, has_head_norms=True)
