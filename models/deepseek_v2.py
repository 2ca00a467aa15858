"""DeepSeek-V2, V3 and V3.2: latent attention, and many small experts beside shared ones.

V2 scores experts by softmax, V3 by sigmoid with a learned correction of the choice; in V3.2 an
indexer chooses the attended tokens. config.json selects; otherwise they are one model.
Source: DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3 Technical Report", section 2.1.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.latent_attention import LatentAttention
from models.parallel.group import ParallelGroup


class DeepseekV2ForCausalLM(CausalLM):
    """DeepSeek-V2, V3 or V3.2 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        **CausalLM.packed_modules_mapping,
        "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        return LatentAttention(config, index, group)
