"""Mamba 2: layers of state spaces only, without attention and feed-forward layers.

Source: Dao and Gu 2024, "Transformers are SSMs", section 7; transformers 5.23, models/mamba2.
"""

from typing import ClassVar

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.mamba2 import Mamba2
from models.layers.mixer_layer import MixerLayer
from models.layers.pipeline import make_layers
from models.parallel.group import SINGLE, ParallelGroup


class Mamba2ForCausalLM(CausalLM):
    """Mamba 2 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.",
        "backbone.": "model.",
        ".mixer.out_proj.": ".mixer.o_proj.",
    }

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: MixerLayer(config, index, Mamba2(config, index, group)),
            ),
            group,
        )
