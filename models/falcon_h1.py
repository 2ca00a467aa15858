"""Falcon-H1: attention and Mamba 2 side by side in every layer, with a factor of every part.

Source: Falcon LLM Team 2025, "Falcon-H1", section 2; transformers 5.23, models/falcon_h1.
"""

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.multipliers import HybridFactors
from models.layers.decoder import CausalLM
from models.layers.gated_mlp import GatedMLP
from models.layers.mamba2 import Mamba2
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.parallel.group import ParallelGroup


class _Mamba2(Mamba2):
    """Mamba 2 with factors of its inputs and of what it projects them to."""

    factors: torch.Tensor

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__(config, layer_index, group)
        self._input_factor = _factors(config).state_input
        values = zip(_factors(config).state_parts, self.in_proj.local_sizes, strict=True)
        factors = torch.cat([torch.full((size,), factor) for factor, size in values])
        self.register_buffer("factors", factors.to(torch.get_default_dtype()), persistent=False)

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to gates, convolved inputs and time steps, [T, sum of their sizes]."""
        return super().projected(hidden * self._input_factor) * self.factors


class _GatedMLP(GatedMLP):
    """A feed-forward layer with factors of its gate and its output."""

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__(config, group)
        self._gate_factor, self._output_factor = _factors(config).feed_forward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        inner = silu_and_mul(torch.cat((gate * self._gate_factor, up), dim=-1))
        output: torch.Tensor = self.down_proj(inner) * self._output_factor
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return ()


class FalconH1Layer(nn.Module):
    """Attention beside Mamba 2, then feed-forward, after norms and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        self._factors = _factors(config)
        self.self_attn = SelfAttention(config, layer_index, group)
        self.mamba = _Mamba2(config, layer_index, group)
        self.feed_forward = _GatedMLP(config, group)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with all outputs added."""
        factors, normed = self._factors, self.input_layernorm(hidden)
        attended = self.self_attn(normed * factors.attention_input, rotation)
        mixed = self.mamba(normed, rotation)
        hidden = hidden + (mixed * factors.state_output + attended * factors.attention_output)
        output: torch.Tensor = hidden + self.feed_forward(self.pre_ff_layernorm(hidden))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        return {"residual_norm"}


class FalconH1ForCausalLM(CausalLM):
    """Falcon-H1 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "model.final_layernorm.": "model.norm.",
        ".mamba.out_proj.": ".mamba.o_proj.",
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return FalconH1Layer(config, index, group)


def _factors(config: ModelConfig) -> HybridFactors:
    """Returns a config's factors.

    Raises:
        ValueError: it has none.
    """
    if config.multipliers.hybrid is None:
        raise ValueError(f"{config.architecture} needs factors of its parts")
    return config.multipliers.hybrid
