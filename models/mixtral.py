"""Mixtral: Llama whose feed-forward layers are eight experts, two of them for each token.

Source: Jiang et al. 2024, "Mixtral of Experts", section 2.
"""

from collections.abc import Sequence
from typing import ClassVar

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.moe import feed_forward, per_expert_tensors
from models.layers.self_attention import SelfAttention
from models.layers.weight import ExpertTensor
from models.parallel.group import SINGLE, ParallelGroup


class MixtralForCausalLM(CausalLM):
    """Mixtral with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {".block_sparse_moe.": ".mlp."}

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        layers = [
            DecoderLayer(
                config,
                SelfAttention(config, index, group),
                feed_forward(config, index, group),
            )
            for index in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, group)

    @classmethod
    def expert_mapping(cls, config: ModelConfig) -> Sequence[ExpertTensor]:
        """Returns where each expert's tensors go."""
        return per_expert_tensors(config, gate="w1", up="w3", down="w2")
