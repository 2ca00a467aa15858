"""EXAONE 4: norms after both sub-layers, and of each query and key head.

Layers without a window have no positions where others have one.
Source: LG AI Research 2025, "EXAONE 4.0", section 2.1.
"""

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.pipeline import make_layers
from models.layers.post_norm_layer import PostNormLayer
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class Exaone4ForCausalLM(CausalLM):
    """EXAONE 4 with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: PostNormLayer(
                    config, SelfAttention(config, index, group, has_head_norms=True), group
                ),
            ),
            group,
        )
