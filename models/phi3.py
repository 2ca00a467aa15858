"""Phi-3 and Phi-4: Llama whose checkpoint stores packed projections.

Some sizes rotate part of each head.
Source: Abdin et al. 2024, "Phi-3 Technical Report", section 2.
"""

from typing import ClassVar

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer, GatedMLP
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class Phi3ForCausalLM(CausalLM):
    """Phi-3 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {}

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
