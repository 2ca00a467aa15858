"""Llama 4: attention in chunks of positions, and one expert of many besides a shared one.

Layers with positions attend within chunks; the others see all keys, and their queries grow with the
position. Heads are normalised without weights, after their rotation in the released code and before
it here, which is the same.
Source: transformers 5.24, models/llama4.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Llama4ForCausalLM(CausalLM):
    """The text part of Llama 4 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        ".feed_forward.router.": ".mlp.gate.",
        ".feed_forward.shared_expert.": ".mlp.shared_experts.",
        ".feed_forward.": ".mlp.",
    }
    transposes_stacked_experts: ClassVar[bool] = True

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        has_norms = config.use_qk_norm and index not in config.unrotated_layers
        return SelfAttention(config, index, group, has_head_norms=has_norms, has_norm_weights=False)
