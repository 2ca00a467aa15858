"""Mamba 2: layers of state spaces only, without attention and feed-forward layers.

Source: Dao and Gu 2024, "Transformers are SSMs", section 7; transformers 5.23, models/mamba2.
"""

from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.mamba2 import Mamba2
from models.layers.mixer_layer import MixerLayer
from models.parallel.group import ParallelGroup


class Mamba2ForCausalLM(CausalLM):
    """Mamba 2 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.",
        "backbone.": "model.",
        ".mixer.out_proj.": ".mixer.o_proj.",
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return MixerLayer(config, index, Mamba2(config, index, group))
