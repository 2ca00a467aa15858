"""LFM2: gated short convolutions in most layers, attention with normalised heads in the others.

Feed-forward layers are dense, or past the first ones have experts.
Source: Liquid AI 2025, "LFM2 Technical Report"; transformers 5.23, models/lfm2 and models/lfm2_moe.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.decoder import CausalLM
from models.layers.short_conv import ShortConv
from models.parallel.group import ParallelGroup


class Lfm2ForCausalLM(CausalLM):
    """LFM2, with or without experts, and its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        "model.embedding_norm.": "model.norm.",
        ".conv.conv.": ".self_attn.conv1d.",
        ".conv.": ".self_attn.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        "_layernorm.": "_norm.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".feed_forward.": ".mlp.",
    }
    expert_names: ClassVar[tuple[str, str, str] | None] = ("w1", "w3", "w2")

    has_head_norms: ClassVar[bool] = True

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention or other mixer of the layer of a number."""
        if config.mixer(index) == STATE:
            return ShortConv(config, index, group)
        return super().make_mixer(config, index, group)
