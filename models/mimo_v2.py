"""MiMo-V2: values shorter than keys, windows with sinks and more kv heads, sigmoid routing.

Its first draft layer has a window, sinks and a dense feed-forward part; later ones are passed over.
Source: transformers 5.24, models/mimo_v2_flash; of draft layers SGLang,
models/mimo_v2_flash_nextn.py, and vLLM, model_executor/models/mimo_v2_mtp.py.
"""

import re
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.draft_layer import LastLayerDraft
from models.layers.gated_mlp import GatedMLP
from models.layers.short_value_attention import ShortValueAttention
from models.parallel.group import ParallelGroup

_DRAFT_LAYER = re.compile(r"model\.mtp\.layers\.(\d+)\.")


class MiMoV2FlashForCausalLM(CausalLM):
    """MiMo-V2 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qk_proj": ("q_proj", "k_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".self_attn.attention_sink_bias": ".self_attn.sinks",
    }
    draft_mapping: ClassVar[dict[str, str]] = {
        "pre_mlp_layernorm.": "post_attention_layernorm.",
        "final_layernorm.": "shared_head.norm.",
    }
    """Names of a draft layer's tensors -> in models.layers.draft_layer."""

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        return ShortValueAttention(config, index, group)

    def make_draft_layer(self, layer_index: int, group: ParallelGroup) -> nn.Module:
        """Returns the draft layer."""
        config = self.config
        parts = ShortValueAttention(config, layer_index, group), GatedMLP(config, group)
        return LastLayerDraft(config, parts, group)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name; a draft layer's becomes that of a layer past the last."""
        if match := _DRAFT_LAYER.match(name):
            rest = name.removeprefix(match[0])
            for stored, ours in self.draft_mapping.items():
                rest = rest.replace(stored, ours)
            name = f"model.layers.{self.config.num_hidden_layers + int(match[1])}.{rest}"
        return super().renamed(name)
