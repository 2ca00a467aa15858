"""Qwen2 and Qwen3 with experts: in some or all layers a token uses a few of many small experts.

Qwen2's layers also have an expert that all tokens share, weighed by a gate of its own. The text
part of Qwen3-VL stores all experts of a layer in one tensor.
Source: Yang et al. 2024, "Qwen2 Technical Report", section 2.2.2; Yang et al. 2025, "Qwen3
Technical Report", section 2.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.experts import TransposedExperts
from models.layers.moe import feed_forward
from models.parallel.group import ParallelGroup


class Qwen2MoeForCausalLM(CausalLM):
    """Qwen2 with experts and its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {".shared_expert.": ".shared_experts."}


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3 with experts and its language-model head."""

    has_head_norms: ClassVar[bool] = True


class Qwen3VLMoeForCausalLM(Qwen3MoeForCausalLM):
    """The text part of Qwen3-VL with experts."""

    expert_names = None

    @classmethod
    def make_feed_forward(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the feed-forward part of the layer of a number."""
        return feed_forward(config, index, group, TransposedExperts)
