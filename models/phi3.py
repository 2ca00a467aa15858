"""Phi-3 and Phi-4: Llama whose checkpoint stores packed projections.

Some sizes rotate part of each head.
Source: Abdin et al. 2024, "Phi-3 Technical Report", section 2.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.gated_mlp import GatedMLP
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Phi3ForCausalLM(CausalLM):
    """Phi-3 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {}

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return DecoderLayer(config, SelfAttention(config, index, group), GatedMLP(config, group))
