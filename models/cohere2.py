"""Cohere 2 (Command A, Command R7B, Aya): attention and feed-forward side by side after one norm.

Norms subtract the mean. Layers without a window have no positions.
Source: transformers 5.23, models/cohere2.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from models.config import ModelConfig
from models.layers.decoder import CausalLM, Decoder
from models.layers.gated_mlp import GatedMLP
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.layers.weight import Replicated, empty_parameter
from models.parallel.group import ParallelGroup


class MeanNorm(Replicated, nn.Module):
    """Layer normalisation with a gain and without a bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return functional.layer_norm(x, self.weight.shape, self.weight, None, self._eps)


class Cohere2Layer(nn.Module):
    """Attention and feed-forward, both after one norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, group: ParallelGroup) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, index, group)
        self.mlp = GatedMLP(config, group)
        self.input_layernorm = MeanNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with both outputs added."""
        normed = self.input_layernorm(hidden)
        output: torch.Tensor = hidden + self.self_attn(normed, rotation) + self.mlp(normed)
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        return ()


class Cohere2Decoder(Decoder):
    """A decoder whose last norm subtracts the mean, too."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], group: ParallelGroup
    ) -> None:
        super().__init__(config, layers, group)
        if group.stage.is_last:
            self.norm = MeanNorm(config.hidden_size, config.rms_norm_eps)


class Cohere2ForCausalLM(CausalLM):
    """Cohere 2 with its language-model head."""

    decoder_class: ClassVar[type[Decoder]] = Cohere2Decoder

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return Cohere2Layer(config, index, group)
