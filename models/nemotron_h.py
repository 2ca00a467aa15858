"""Nemotron-H: layers of Mamba 2, attention without positions, and feed-forward, one part each.

Feed-forward layers square the positive part of their inner values, without a gate; some have
experts. A draft layer may follow, of attention and experts.
Source: NVIDIA 2025, "Nemotron-H", section 2; transformers 5.23, models/nemotron_h.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import ATTENTION, STATE
from models.layers.decoder import CausalLM
from models.layers.draft_layer import DraftLayer
from models.layers.mamba2 import Mamba2
from models.layers.mixer_layer import MixerLayer
from models.layers.self_attention import SelfAttention
from models.layers.squared_mlp import SquaredMLP
from models.layers.squared_moe import SquaredMoE
from models.layers.weight import ExpertTensor
from models.parallel.group import ParallelGroup


class NemotronHForCausalLM(CausalLM):
    """Nemotron-H with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
        ".mixer.out_proj.": ".mixer.o_proj.",
    }
    unused_parts: ClassVar[tuple[str, ...]] = ("mtp.",)
    """Draft layers of other parts than `draft_mapping` names."""
    draft_mapping: ClassVar[dict[str, str]] = {
        "mtp.layers.0.norm.": "input_layernorm.",
        "mtp.layers.0.mixer.": "self_attn.",
        "mtp.layers.0.": "",
        "mtp.layers.1.norm.": "post_attention_layernorm.",
        "mtp.layers.1.mixer.": "mlp.",
        "mtp.layers.1.final_layernorm.": "shared_head.norm.",
    }
    """Start of the names of the draft layer's tensors -> in models.deepseek_mtp.

    Source: vLLM, model_executor/models/nemotron_h_mtp.py at 01ca277.
    """

    @classmethod
    def expert_mapping(cls, config: ModelConfig) -> Sequence[ExpertTensor]:
        """Returns where the tensors of single experts go; none of a dense model."""
        if config.moe is None:
            return ()
        return [
            ExpertTensor(f"experts.{parameter}", f"experts.{expert}.{name}.weight", expert, 0)
            for expert in range(config.moe.num_experts)
            for name, parameter in (("up_proj", "gate_up_proj"), ("down_proj", "down_proj"))
        ]

    def make_draft_layer(self, layer_index: int, group: ParallelGroup) -> nn.Module:
        """Returns the draft layer, of attention and experts."""
        unrotated = (*self.config.unrotated_layers, layer_index)
        config = replace(self.config, unrotated_layers=unrotated)
        attention = SelfAttention(config, layer_index, group)
        return DraftLayer(self.config, (attention, SquaredMoE(config, group)), group)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name; the draft layer's becomes that of a layer past the last.

        A checkpoint has it as two layers under `mtp.`.
        """
        layer = f"model.layers.{self.config.num_hidden_layers}."
        for stored, ours in self.draft_mapping.items():
            if name.startswith(stored):
                return super().renamed(layer + ours + name.removeprefix(stored))
        return super().renamed(name)

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return MixerLayer(config, index, _part(config, index, group))


def _part(config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
    if config.mixer(index) == STATE:
        return Mamba2(config, index, group)
    if config.mixer(index) == ATTENTION:
        return SelfAttention(config, index, group)
    if config.moe is None or index in config.moe.dense_layers:
        return SquaredMLP(config, group, inner_size=config.intermediate_size)
    return SquaredMoE(config, group)
