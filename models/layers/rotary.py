"""Rotary position embedding: the table of angles and its scaling rules."""

import math

import torch
from torch import nn

from models.config import RopeConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine of the step's positions, each [T, 1, D]."""


class RotaryEmbedding(nn.Module):
    """Looks up each position's rotation; once a step, shared by all layers."""

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        super().__init__()
        angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1)
        angles = angles * inverse_frequencies(head_dim, rope)
        cos, sin = angles.cos(), angles.sin()
        # Computed in float32 and rounded once to the model's dtype, as transformers does.
        table = torch.cat((cos, cos, -sin, sin), dim=-1).to(torch.get_default_dtype())
        self.register_buffer("table", table.unsqueeze(1), persistent=False)
        self.table: torch.Tensor

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Maps [T] positions to cosine and signed sine, each [T, 1, D], for apply_rotary."""
        cos, signed_sin = self.table.index_select(0, positions).chunk(2, dim=-1)
        return cos, signed_sin


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Returns the angle per position of each pair, in radians: [D / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slows long wavelengths by `factor`, keeps short ones, and blends in between.

    Source: Llama 3.1 reference code, apply_scaling, in meta-llama/llama-models.
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)
