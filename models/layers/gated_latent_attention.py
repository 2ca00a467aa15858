"""Latent attention whose heads' outputs gates scale."""

import torch

from models.config import ModelConfig
from models.layers.latent_attention import LatentAttention
from models.layers.linear import MergedColumnParallelLinear
from models.layers.rotary import Rotation
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.parallel.group import ParallelGroup


class GatedLatentAttention(LatentAttention):
    """Latent attention with a gate for each head.

    Source: transformers 5.23, models/bailing_hybrid.
    """

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__(config, layer_index, group)
        self.g_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.num_attention_heads], bias=False, group=group
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        attended = self.attended(hidden, rotation)
        gate = self.g_proj(hidden).unsqueeze(-1).expand(attended.shape).flatten(1)
        output: torch.Tensor = self.o_proj(sigmoid_gate(attended.flatten(1), gate))
        return output
