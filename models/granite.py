"""Granite: Llama whose token vectors, sub-layers' outputs, attention scores and logits are scaled.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2.
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.gated_mlp import GatedMLP
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class GraniteForCausalLM(CausalLM):
    """Granite with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return DecoderLayer(config, SelfAttention(config, index, group), GatedMLP(config, group))
