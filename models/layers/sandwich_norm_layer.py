"""A decoder layer with norms before and after its sub-layers."""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.gated_mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.parallel.group import ParallelGroup


class SandwichNormLayer(nn.Module):
    """Attention and feed-forward, each between two norms and added to the residual stream.

    Source: Gemma Team 2024, "Gemma 2", section 2.
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module, group: ParallelGroup) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.self_attn = self_attn
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
