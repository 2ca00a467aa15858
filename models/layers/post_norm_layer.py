"""A decoder layer with norms after its sub-layers instead of before.

Source: OLMo Team 2024, "2 OLMo 2 Furious", section 3.3.
"""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.gated_mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class PostNormLayer(nn.Module):
    """Attention and feed-forward, each before a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, group: ParallelGroup) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = GatedMLP(config, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with both outputs added."""
        hidden = hidden + self.post_attention_layernorm(self.self_attn(hidden, rotation))
        output: torch.Tensor = hidden + self.post_feedforward_layernorm(self.mlp(hidden))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        return ()
