"""Qwen3: Llama with each query and key head normalised before it is rotated.

Source: Yang et al. 2025, "Qwen3 Technical Report", section 2.
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.gated_mlp import GatedMLP
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return DecoderLayer(
            config,
            SelfAttention(config, index, group, has_head_norms=True),
            GatedMLP(config, group),
        )
