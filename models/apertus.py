"""Apertus: normalised heads, and feed-forward layers without a gate, whose activation is learned.

Source: Apertus Team 2025, "Apertus", section 2.1; transformers 5.23, models/apertus.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.weight import Replicated, empty_parameter
from models.parallel.group import ParallelGroup

_BETA, _EPS = 0.5, -1e-6


class Xielu(Replicated, nn.Module):
    """A parabola for positive x, an exponential for negative x, both plus x / 2.

    Source: Huang and Schlag 2024, "Deriving Activation Functions Using Integration", equation 12.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = empty_parameter(1)
        self.alpha_n = empty_parameter(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps each element."""
        rise = functional.softplus(self.alpha_p) * x * x
        fall = (torch.expm1(x.clamp(max=_EPS)) - x) * (_BETA + functional.softplus(self.alpha_n))
        return torch.where(x > 0, rise, fall) + _BETA * x


class XieluMLP(nn.Module):
    """Feed-forward layer down(xielu(up(x)))."""

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up_proj = MergedColumnParallelLinear(hidden, [inner], bias=bias, group=group)
        self.down_proj = RowParallelLinear(inner, hidden, bias=bias, group=group)
        self.act_fn = Xielu()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(hidden)))
        return output


class ApertusForCausalLM(CausalLM):
    """Apertus with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    }
    weights_mapping: ClassVar[dict[str, str]] = {
        ".attention_layernorm.": ".input_layernorm.",
        ".feedforward_layernorm.": ".post_attention_layernorm.",
    }

    has_head_norms: ClassVar[bool] = True

    @classmethod
    def make_feed_forward(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the feed-forward part of the layer of a number."""
        del index
        return XieluMLP(config, group)

    def is_unused(self, name: str) -> bool:
        """Returns whether a stored tensor repeats another part of the model, or is a constant."""
        return super().is_unused(name) or name.endswith((".act_fn.beta", ".act_fn.eps"))
