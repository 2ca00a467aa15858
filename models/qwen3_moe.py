"""Qwen3 with experts: in some or all layers each token uses a few of many small experts.

Source: Yang et al. 2025, "Qwen3 Technical Report", section 2.
"""

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.moe import feed_forward
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3 with experts and its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: DecoderLayer(
                    config,
                    SelfAttention(config, index, group, has_head_norms=True),
                    feed_forward(config, index, group),
                ),
            ),
            group,
        )
