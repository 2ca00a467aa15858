"""MiMo-V2: values shorter than keys, windows with sinks and more kv heads, sigmoid routing.

Draft layers of released checkpoints are passed over.
Source: transformers 5.24, models/mimo_v2_flash.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.short_value_attention import ShortValueAttention
from models.parallel.group import ParallelGroup


class MiMoV2FlashForCausalLM(CausalLM):
    """MiMo-V2 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qk_proj": ("q_proj", "k_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".self_attn.attention_sink_bias": ".self_attn.sinks",
    }
    unused_parts: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        return ShortValueAttention(config, index, group)
