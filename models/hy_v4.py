"""Hunyuan Hy4: gated latent attention with sinks and an indexer, between hyper-connections.

Draft layers of released checkpoints are passed over.
Source: transformers 5.24, models/hy_v4.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, Decoder
from models.layers.gated_latent_attention import GatedLatentAttention
from models.layers.hyper_connection import HyperDecoder, HyperLayer
from models.layers.moe import feed_forward
from models.parallel.group import ParallelGroup

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
    unused_parts: ClassVar[tuple[str, ...]] = ("model.mtp_layers.",)

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        attention = GatedLatentAttention(config, index, group, gates_elements=True)
        mlp = feed_forward(config, index, group)
        return HyperLayer(config, attention, mlp, is_first=index == 0)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name in the model's family."""
        for pattern, ours in _RENAMES:
            name = re.sub(pattern, ours, name)
        return name
