"""Granite 4: Granite with layers of Mamba 2, and experts besides a layer that all tokens share.

Some models have no layers of Mamba 2, some no experts, and most attention has no positions.
Source: IBM 2025, "Granite 4.0"; transformers 5.23, models/granitemoehybrid.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.decoder import CausalLM
from models.layers.mamba2 import Mamba2
from models.parallel.group import ParallelGroup


class GraniteMoeHybridForCausalLM(CausalLM):
    """Granite 4 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("input_linear",),
        "down_proj": ("output_linear",),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".mamba.out_proj.": ".self_attn.o_proj.",
        ".mamba.": ".self_attn.",
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".block_sparse_moe.router.": ".mlp.gate.",
        ".block_sparse_moe.": ".mlp.",
    }

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention or other mixer of the layer of a number."""
        if config.mixer(index) == STATE:
            return Mamba2(config, index, group)
        return super().make_mixer(config, index, group)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name in the model's family."""
        shared = ".mlp." if self.config.moe is None else ".mlp.shared_experts."
        return super().renamed(name).replace(".shared_mlp.", shared)
