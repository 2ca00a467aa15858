"""EXAONE 4: norms after both sub-layers, and of each query and key head.

Layers without a window have no positions where others have one.
Source: LG AI Research 2025, "EXAONE 4.0", section 2.1.
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.post_norm_layer import PostNormLayer
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Exaone4ForCausalLM(CausalLM):
    """EXAONE 4 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return PostNormLayer(
            config, SelfAttention(config, index, group, has_head_norms=True), group
        )
