"""Qwen3-Next, and the text parts of Qwen3.5 to 3.8: Gated DeltaNet in most layers.

The others have attention whose output is gated. Norms add one to their weights. Feed-forward layers
have experts, or are dense in Qwen3.5 without experts. A draft layer follows, with attention.
Source: Qwen Team 2025, "Qwen3-Next"; transformers 5.23, models/qwen3_next and models/qwen3_5.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.decoder import CausalLM
from models.layers.draft_layer import DraftLayer
from models.layers.gated_attention import GatedAttention
from models.layers.gated_delta_net import GatedDeltaNet
from models.parallel.group import ParallelGroup


class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "model.language_model.": "model.",
        ".linear_attn.out_proj.": ".self_attn.o_proj.",
        ".linear_attn.": ".self_attn.",
        ".shared_expert.": ".shared_experts.",
    }
    unused_parts: ClassVar[tuple[str, ...]] = ("model.visual.",)
    draft_mapping: ClassVar[dict[str, str]] = {
        "layers.0.": "",
        "fc.": "eh_proj.",
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "norm.": "shared_head.norm.",
    }
    """Names of the draft layer's tensors after `mtp.` -> in models.deepseek_mtp."""
    is_interleaved: ClassVar[bool] = True
    """Whether projections of Gated DeltaNet are stored together, by heads of keys."""

    def make_draft_layer(self, layer_index: int, group: ParallelGroup) -> nn.Module:
        """Returns the draft layer."""
        config = self.config
        mixer = self.make_mixer(config, layer_index, group)
        mlp = self.make_feed_forward(config, layer_index, group)
        return DraftLayer(config, (mixer, mlp), group)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name; the draft layer's becomes that of a layer past the last.

        A checkpoint has it under `mtp.`, with its projection and norms beside it.
        """
        if name.startswith("mtp."):
            name = name.removeprefix("mtp.")
            for stored, ours in self.draft_mapping.items():
                if name.startswith(stored):
                    name = ours + name.removeprefix(stored)
                    break
            name = f"model.layers.{self.config.num_hidden_layers}.{name}"
        return super().renamed(name)

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention or other mixer of the layer of a number."""
        if config.mixer(index) == STATE:
            return GatedDeltaNet(config, index, group, is_interleaved=cls.is_interleaved)
        return GatedAttention(config, index, group)


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):  # noqa: N801  # the name in config.json
    """Qwen3.5 with experts and its language-model head."""

    is_interleaved: ClassVar[bool] = False
    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }


class Qwen3_5ForCausalLM(Qwen3_5MoeForCausalLM):  # noqa: N801  # the name in config.json
    """Qwen3.5 without experts, and its language-model head."""
