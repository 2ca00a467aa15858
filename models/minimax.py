"""MiniMax-Text: lightning attention in most layers, softmax attention in the others, and experts.

Each sub-layer adds to its normalised input, both scaled by factors of its kind.
Source: MiniMax 2025, "MiniMax-01", section 2; transformers 5.23, models/minimax.
"""

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.decoder import CausalLM
from models.layers.lightning import LightningAttention
from models.layers.moe import feed_forward
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup

_TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Stored tables of decays, which config.json determines."""


class MiniMaxLayer(nn.Module):
    """Attention of either kind and experts, each after a norm and added to what the norm gives."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        is_lightning = config.mixer(layer_index) == STATE
        mixer = LightningAttention if is_lightning else SelfAttention
        self.self_attn: nn.Module = mixer(config, layer_index, group)
        self.mlp = feed_forward(config, layer_index, group)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        factors = config.multipliers.weighed_sums
        if factors is None:
            raise ValueError(f"{config.architecture} needs factors of its sums")
        self._attention_factors = factors.lightning if is_lightning else factors.attention
        self._mlp_factors = factors.feed_forward

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the next layer's."""
        hidden = self.input_layernorm(hidden)
        kept, added = self._attention_factors
        hidden = hidden * kept + self.self_attn(hidden, rotation) * added
        hidden = self.post_attention_layernorm(hidden)
        kept, added = self._mlp_factors
        output: torch.Tensor = hidden * kept + self.mlp(hidden) * added
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        return ()


class MiniMaxForCausalLM(CausalLM):
    """MiniMax-Text with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".self_attn.qkv_proj.": ".self_attn.in_proj.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
    }
    expert_names: ClassVar[tuple[str, str, str] | None] = ("w1", "w3", "w2")

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return MiniMaxLayer(config, index, group)

    def is_unused(self, name: str) -> bool:
        """Returns whether a stored tensor repeats another part of the model, or is a table."""
        return super().is_unused(name) or name.endswith(_TABLES)
