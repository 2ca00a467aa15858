"""Qwen3: Llama with each query and key head normalised before it is rotated.

Source: Yang et al. 2025, "Qwen3 Technical Report", section 2.
"""

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.decoder import CausalLM, DecoderLayer, GatedMLP, Rotation
from models.layers.linear import QKVParallelLinear, RowParallelLinear
from models.layers.norm import RMSNorm
from models.parallel.group import SINGLE, ParallelGroup


class Qwen3Attention(nn.Module):
    """Grouped-query self-attention with rotary positions and normalised heads."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            group=group,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(layer_index)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            group=group,
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        q, k, v = self.qkv_proj.forward_heads(hidden)
        norms = self.q_norm, self.k_norm
        attended = self.attn(q, k, v, rotation=rotation, norms=norms)
        output: torch.Tensor = self.o_proj(attended)
        return output


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        layers = [
            DecoderLayer(config, Qwen3Attention(config, index, group), GatedMLP(config, group))
            for index in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, group)
