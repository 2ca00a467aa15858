"""GLM-4 (0414): norms before and after sub-layers, and a rotation of neighbours in half a head.

Also the text part of GLM-4.1V.
Source: transformers 5.23, models/glm4.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.sandwich_norm_layer import SandwichNormLayer
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Glm4ForCausalLM(CausalLM):
    """GLM-4 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return SandwichNormLayer(config, SelfAttention(config, index, group), group)
