"""GLM-4.5: experts chosen by sigmoid scores beside shared ones, after some dense layers.

Half of each head is rotated, and in some sizes heads are normalised before that.
Source: Zeng et al. 2025, "GLM-4.5", section 2.1.
"""

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.self_attention import SelfAttention
from models.parallel.group import ParallelGroup


class Glm4MoeForCausalLM(CausalLM):
    """GLM-4.5 with its language-model head."""

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        return SelfAttention(config, index, group, has_head_norms=config.use_qk_norm)
