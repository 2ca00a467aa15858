"""OLMo Hybrid: OLMo 3's layers of attention among layers of Gated DeltaNet.

The latter have their norms before their parts, and states whose eigenvalues may be negative.
Source: transformers 5.23, models/olmo_hybrid.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.gated_mlp import GatedMLP
from models.layers.post_norm_layer import PostNormLayer
from models.layers.projection_norm import ProjectionNormAttention
from models.parallel.group import ParallelGroup


class OlmoHybridForCausalLM(CausalLM):
    """OLMo Hybrid with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "in_proj_qkvz": ("q_proj", "k_proj", "v_proj", "g_proj"),
        "in_proj_ba": ("b_proj", "a_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".linear_attn.o_norm.": ".self_attn.norm.",
        ".linear_attn.": ".self_attn.",
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return _layer(config, index, group)


def _layer(config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
    if config.mixer(index) == STATE:
        mixer = GatedDeltaNet(config, index, group, stored=((0,), (1,), (2,), (3,)))
        return DecoderLayer(config, mixer, GatedMLP(config, group))
    return PostNormLayer(config, ProjectionNormAttention(config, index, group), group)
