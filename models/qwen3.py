"""Qwen3: Llama with each query and key head normalised before it is rotated.

Source: Yang et al. 2025, "Qwen3 Technical Report", section 2.
"""

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer, GatedMLP
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: DecoderLayer(
                    config,
                    SelfAttention(config, index, group, has_head_norms=True),
                    GatedMLP(config, group),
                ),
            ),
            group,
        )
