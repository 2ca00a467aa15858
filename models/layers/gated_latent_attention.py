"""Latent attention whose heads' outputs gates scale."""

import torch

from models.config import ModelConfig
from models.layers.latent_attention import LatentAttention
from models.layers.linear import MergedColumnParallelLinear
from models.layers.rotary import Rotation
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.parallel.group import ParallelGroup


class GatedLatentAttention(LatentAttention):
    """Latent attention with a gate for each head, or for each element.

    Source: transformers 5.24, models/bailing_hybrid and models/hy_v4.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        gates_elements: bool = False,
    ) -> None:
        super().__init__(config, layer_index, group)
        num_gates = config.num_attention_heads * (self._mla.v_head_dim if gates_elements else 1)
        self.g_proj = MergedColumnParallelLinear(
            config.hidden_size, [num_gates], bias=False, group=group
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        attended = self.attended(hidden, rotation)
        gates = self.g_proj(hidden).view(*attended.shape[:2], -1).expand(attended.shape)
        output: torch.Tensor = self.o_proj(sigmoid_gate(attended.flatten(1), gates.flatten(1)))
        return output
