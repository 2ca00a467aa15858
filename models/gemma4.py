"""The text part of Gemma 4: larger heads in layers without a window, whose keys may be values.

Small sizes have an embedding of each token for each layer, and last layers that share the cache of
earlier ones; one size has experts beside the dense feed-forward layer.
Source: transformers 5.23, models/gemma4 and models/gemma4_unified.
"""

from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import SHARED
from models.layers.decoder import CausalLM, Decoder
from models.layers.gated_mlp import GatedMLP
from models.layers.gelu_moe import GeluMoE
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.sandwich_norm_layer import SandwichNormLayer
from models.layers.shared_cache_attention import SharedCacheAttention, gemma4_config
from models.layers.token_inputs import TokenInputDecoder, TokenInputGate
from models.layers.weight import empty_parameter
from models.parallel.group import ParallelGroup


class Gemma4Layer(SandwichNormLayer):
    """Attention, feed-forward and experts side by side, and what the token's own embedding adds."""

    def __init__(self, config: ModelConfig, index: int, group: ParallelGroup) -> None:
        super().__init__(config, SharedCacheAttention(config, index, group), group)
        gemma4, size, eps = gemma4_config(config), config.hidden_size, config.rms_norm_eps
        if config.mixer(index) == SHARED:
            inner_size = gemma4.sharing_scale * config.intermediate_size
            self.mlp = GatedMLP(config, group, intermediate_size=inner_size)
        self.moe: GeluMoE | None = None
        if config.moe is not None:
            self.moe = GeluMoE(config, group)
            self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(size, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)
        self.token_input = TokenInputGate(config, gemma4.token_size) if gemma4.token_size else None
        self.layer_scalar = empty_parameter(1)

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, token_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the next layer's; token_input is [T, n]."""
        attended = self.self_attn(self.input_layernorm(hidden), rotation)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        if self.moe is not None:
            chosen = self.moe(self.pre_feedforward_layernorm_2(hidden), hidden)
            fed = self.post_feedforward_layernorm_1(fed) + self.post_feedforward_layernorm_2(chosen)
        hidden = hidden + self.post_feedforward_layernorm(fed)
        if self.token_input is not None:
            hidden = hidden + self.token_input(hidden, token_input)
        return hidden * self.layer_scalar


class Gemma4ForCausalLM(CausalLM):
    """Gemma 4 with its language-model head."""

    decoder_class: ClassVar[type[Decoder]] = TokenInputDecoder
    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "qk_proj": ("q_proj", "k_proj"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".router.": ".moe.router.",
        ".experts.": ".moe.experts.",
        ".per_layer_input_gate.": ".token_input.gate.",
        ".per_layer_projection.": ".token_input.projection.",
        ".post_per_layer_input_norm.": ".token_input.norm.",
    }
    expert_names = None

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return Gemma4Layer(config, index, group)
