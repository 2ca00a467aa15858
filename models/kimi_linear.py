"""Kimi Linear and Ling 3: Kimi Delta Attention, and latent attention in every few layers.

Kimi Linear's latent attention has no positions; Ling 3's has a gate for each head's output.
Source: Kimi Team 2025, "Kimi Linear", section 4; transformers 5.23, models/kimi_linear and
models/bailing_hybrid.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.decoder import CausalLM
from models.layers.gated_latent_attention import GatedLatentAttention
from models.layers.kimi_delta import KimiDeltaAttention
from models.layers.latent_attention import LatentAttention
from models.parallel.group import ParallelGroup


class KimiLinearForCausalLM(CausalLM):
    """Kimi Linear with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
        "fg_a_proj": ("f_a_proj", "g_a_proj"),
        "fg_proj": ("f_proj", "g_proj"),
        "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".forget_gate.": ".",
    }
    expert_names: ClassVar[tuple[str, str, str] | None] = ("w1", "w3", "w2")

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention or other mixer of the layer of a number."""
        if config.mixer(index) == STATE:
            return KimiDeltaAttention(config, index, group, has_small_gates=True)
        return LatentAttention(config, index, group)


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Ling 3 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.": ".self_attn.",
        ".forget_gate.": ".",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
    }
    expert_names: ClassVar[tuple[str, str, str] | None] = CausalLM.expert_names

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention or other mixer of the layer of a number."""
        if config.mixer(index) == STATE:
            return KimiDeltaAttention(config, index, group, has_small_gates=False)
        return GatedLatentAttention(config, index, group)
