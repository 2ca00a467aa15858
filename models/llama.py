"""Llama: grouped-query attention with rotary positions, gated feed-forward, RMSNorm.

Also Mistral and Qwen2, with sliding windows; InternLM 3, Seed-OSS and ERNIE 4.5, with other biases;
and SmolLM3, some of whose layers have no positions.
Source: Touvron et al. 2023, "LLaMA"; Dubey et al. 2024, "The Llama 3 Herd of Models".
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.gated_mlp import GatedMLP
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class LlamaForCausalLM(CausalLM):
    """Llama with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return DecoderLayer(config, SelfAttention(config, index, group), GatedMLP(config, group))
