"""Hunyuan Hy3: normalised heads, and experts chosen by sigmoid scores beside a shared one.

Source: transformers 5.23, models/hy_v3.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.moe import feed_forward
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class HYV3ForCausalLM(CausalLM):
    """Hy3 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return DecoderLayer(
            config,
            SelfAttention(config, index, group, has_head_norms=True),
            feed_forward(config, index, group),
        )
