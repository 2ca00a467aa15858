"""Mixtral: Llama whose feed-forward layers are eight experts, two of them for each token.

Source: Jiang et al. 2024, "Mixtral of Experts", section 2.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.moe import feed_forward
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class MixtralForCausalLM(CausalLM):
    """Mixtral with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {".block_sparse_moe.": ".mlp."}
    expert_names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return DecoderLayer(
            config,
            SelfAttention(config, index, group),
            feed_forward(config, index, group),
        )
