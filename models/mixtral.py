"""Mixtral: Llama whose feed-forward layers are eight experts, two of them for each token.

Source: Jiang et al. 2024, "Mixtral of Experts", section 2.
"""

from typing import ClassVar

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.moe import feed_forward
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class MixtralForCausalLM(CausalLM):
    """Mixtral with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {".block_sparse_moe.": ".mlp."}
    expert_names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: DecoderLayer(
                    config,
                    SelfAttention(config, index, group),
                    feed_forward(config, index, group),
                ),
            ),
            group,
        )
