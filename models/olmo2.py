"""OLMo 2 and 3: norms after both sub-layers instead of before, and of all heads together.

In OLMo 3 three of four layers have a window, with a rotation of their own.
Source: OLMo Team 2024, "2 OLMo 2 Furious", section 3.3.
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.post_norm_layer import PostNormLayer
from models.layers.projection_norm import ProjectionNormAttention
from models.parallel.group import ParallelGroup


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2 or 3 with its language-model head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return PostNormLayer(config, ProjectionNormAttention(config, index, group), group)
