"""A gated short convolution as a mixer of tokens."""

from collections.abc import Collection

import torch

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.config_sections.recurrence import ShortConvConfig
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.rotary import Rotation
from models.layers.state_mixer import CausalConv, StateMixer
from models.ops.recurrence.short_conv import short_conv
from models.parallel.group import ParallelGroup
from models.state_cache import StateSpec


class ShortConv(StateMixer):
    """Mixes few neighbouring tokens: out(c * conv(b * x)); ranks share the channels.

    Source: Liquid AI 2025, "LFM2 Technical Report", section 2.
    """

    splitting_op = "octavo::short_conv"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        conv, hidden = short_conv_config(config), config.hidden_size
        num_channels = group.split(hidden, "channels")
        super().__init__(
            config.cache_index(layer_index, STATE),
            StateSpec(
                conv_channels=num_channels,
                conv_width=conv.width,
                conv_dtype=torch.get_default_dtype(),
            ),
            group,
        )
        self.in_proj = MergedColumnParallelLinear(
            hidden, [hidden] * 3, bias=conv.has_bias, group=group
        )
        self.conv1d = CausalConv([hidden], conv.width, bias=conv.has_bias, group=group)
        self.o_proj = RowParallelLinear(hidden, hidden, bias=conv.has_bias, group=group)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        del rotation
        before, after, x = self.in_proj(hidden).chunk(3, dim=-1)
        mixed = hidden.new_empty(x.shape)
        short_conv(before * x, self.conv1d.weight, self.conv1d.bias, mixed, self.layer_index)
        output: torch.Tensor = self.o_proj(after * mixed)
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return ()


def short_conv_config(config: ModelConfig) -> ShortConvConfig:
    """Returns the sizes of a config's short convolutions.

    Raises:
        ValueError: it has none.
    """
    if config.short_conv is None:
        raise ValueError(f"{config.architecture} needs layers of short convolutions")
    return config.short_conv
