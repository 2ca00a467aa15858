"""Granite: Llama whose token vectors, sub-layers' outputs, attention scores and logits are scaled.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2.
"""

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer, GatedMLP
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class GraniteForCausalLM(CausalLM):
    """Granite with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: DecoderLayer(
                    config, SelfAttention(config, index, group), GatedMLP(config, group)
                ),
            ),
            group,
        )
