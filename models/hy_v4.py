"""Hunyuan Hy4: gated latent attention with sinks and an indexer, between hyper-connections.

A draft layer has attention with an indexer of its own and experts, without hyper-connections.
Source: transformers 5.24, models/hy_v4; of draft layers vLLM, models/hy_v4/nvidia/mtp.py.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, Decoder
from models.layers.draft_layer import DraftLayer
from models.layers.gated_latent_attention import GatedLatentAttention
from models.layers.hyper_connection import HyperDecoder, HyperLayer
from models.layers.moe import feed_forward
from models.parallel.group import ParallelGroup

_DRAFT_LAYER = re.compile(r"model\.mtp_layers\.(\d+)\.")
_RENAMES: Sequence[tuple[str, str]] = [
    (r"\.hc_pre\.", "."),
    (r"^model\.hc_head\.hc_(?:head_)?", "model.norm.head."),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
    (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
]
"""Patterns of names as released and as in transformers -> ours."""


class HYV4ForCausalLM(CausalLM):
    """Hy4 with its language-model head."""

    decoder_class: ClassVar[type[Decoder]] = HyperDecoder
    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        attention = GatedLatentAttention(config, index, group, gates_elements=True)
        mlp = feed_forward(config, index, group)
        return HyperLayer(config, attention, mlp, is_first=index == 0)

    def make_draft_layer(self, layer_index: int, group: ParallelGroup) -> nn.Module:
        """Returns the draft layer of a number."""
        config = self.config
        attention = GatedLatentAttention(config, layer_index, group, gates_elements=True)
        return DraftLayer(config, (attention, feed_forward(config, layer_index, group)), group)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name; a draft layer's becomes that of a layer past the last."""
        if match := _DRAFT_LAYER.match(name):
            rest = name.removeprefix(match[0]).replace("final_layernorm.", "shared_head.norm.")
            name = f"model.layers.{self.config.num_hidden_layers + int(match[1])}.{rest}"
        for pattern, ours in _RENAMES:
            name = re.sub(pattern, ours, name)
        return name
