"""A layer with one part: a mixer of tokens, or a feed-forward layer."""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.mixers import NONE
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation


class MixerLayer(nn.Module):
    """Its part, after a norm and added to the residual stream.

    mixer maps ([T, hidden], Rotation) to [T, hidden]; a feed-forward layer takes no rotation.
    """

    def __init__(self, config: ModelConfig, layer_index: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = mixer
        self._mixes = config.mixer(layer_index) != NONE

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with the output added."""
        normed = self.norm(hidden)
        output = self.mixer(normed, rotation) if self._mixes else self.mixer(normed)
        summed: torch.Tensor = hidden + output
        return summed

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between layers."""
        return ()
