"""GLM-4.5: experts chosen by sigmoid scores beside shared ones, after some dense layers.

Half of each head is rotated, and in some sizes heads are normalised before that.
Source: Zeng et al. 2025, "GLM-4.5", section 2.1.
"""

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.moe import feed_forward
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class Glm4MoeForCausalLM(CausalLM):
    """GLM-4.5 with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: DecoderLayer(
                    config,
                    SelfAttention(config, index, group, has_head_norms=config.use_qk_norm),
                    feed_forward(config, index, group),
                ),
            ),
            group,
        )
