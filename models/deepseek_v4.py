"""DeepSeek V4: recent and compressed keys, hyper-connections, and experts chosen by token id.

The first layers' experts come from a table.
Source: DeepSeek-AI 2026, "DeepSeek-V4"; transformers 5.24, models/deepseek_v4. Of draft layers:
MTPBlock in inference/model.py of the released DeepSeek-V4-Flash; SGLang,
models/deepseek_v4_nextn.py.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.compressed_attention import CompressedAttention
from models.layers.decoder import CausalLM, Decoder
from models.layers.hash_moe import HashDecoder, HashMoE
from models.layers.hyper_connection import HyperLayer
from models.layers.hyper_draft_layer import HyperDraftLayer
from models.parallel.group import ParallelGroup

_RENAMES: Sequence[tuple[str, str]] = [
    (r"^(?=layers\.|norm\.|hc_head)", "model."),
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^model\.hc_head[._](?:hc_)?", "model.norm.head."),
    (r"(layers\.\d+)\.hc_head_", r"\1.shared_head.norm.head."),
    (r"(layers\.\d+)\.norm\.", r"\1.shared_head.norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".indexer."),
    (r"\.compressor\.indexer\.(?:scorer\.)?", ".indexer."),
    (r"(self_attn|compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.w(q_a|q_b|o_a|o_b|kv)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(experts(?:\.\d+)?)\.w1\.", r"\1.gate_proj."),
    (r"(experts(?:\.\d+)?)\.w2\.", r"\1.down_proj."),
    (r"(experts(?:\.\d+)?)\.w3\.", r"\1.up_proj."),
    (r"_proj\.scale$", "_proj.weight_scale"),
]
"""Patterns of names as released -> ours; transformers' own names need some of them, too."""

_DRAFT_LAYER = re.compile(r"(?:model\.)?mtp\.(?:layers\.)?(\d+)\.")


class DeepseekV4ForCausalLM(CausalLM):
    """DeepSeek V4 with its language-model head."""

    decoder_class: ClassVar[type[Decoder]] = HashDecoder
    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_a_proj": ("q_a_proj", "kv_proj"),
        "kv_gate_proj": ("kv_proj", "gate_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        attention = CompressedAttention(config, index, group)
        mlp = HashMoE(config, index, group)
        return HyperLayer(config, attention, mlp, is_first=index == 0)

    def make_draft_layer(self, layer_index: int, group: ParallelGroup) -> nn.Module:
        """Returns the draft layer of a number, which sees recent keys alone."""
        attention = CompressedAttention(self.config, layer_index, group)
        mlp = HashMoE(self.config, layer_index, group)
        return HyperDraftLayer(self.config, (attention, mlp), group)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name; a draft layer's becomes that of a layer past the last."""
        if match := _DRAFT_LAYER.match(name):
            layer = self.config.num_hidden_layers + int(match[1])
            name = f"model.layers.{layer}.{name.removeprefix(match[0])}"
        for pattern, ours in _RENAMES:
            name = re.sub(pattern, ours, name)
        return name
