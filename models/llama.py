"""Llama: grouped-query attention with rotary positions, gated feed-forward, RMSNorm.

Source: Touvron et al. 2023, "LLaMA"; Dubey et al. 2024, "The Llama 3 Herd of Models".
"""

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.decoder import CausalLM, DecoderLayer, GatedMLP, Rotation
from models.layers.linear import QKVParallelLinear, RowParallelLinear
from models.parallel.group import SINGLE, ParallelGroup


class LlamaAttention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

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
        output: torch.Tensor = self.o_proj(self.attn(q, k, v, rotation=rotation))
        return output


class LlamaForCausalLM(CausalLM):
    """Llama with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        layers = [
            DecoderLayer(config, LlamaAttention(config, index, group), GatedMLP(config, group))
            for index in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, group)
