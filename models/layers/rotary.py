"""Rotary position embedding: the table of angles and its scaling rules."""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from models.config_sections.rope import QueryScale, RopeConfig
from models.ops.elementwise.rotary import rotary
from models.ops.elementwise.rotation_rows import rotation_rows


class Rotation(NamedTuple):
    """Cosine and signed sine of the step's positions, each [T, 1, D].

    query_scale: [T, 1, 1], a factor of queries; None without.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    query_scale: torch.Tensor | None = None

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotates heads, [T, H, D]; the result is contiguous."""
        return rotary(heads, self.cos, self.signed_sin)

    @property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each rotated pair, both [T, 1, D / 2]."""
        half = self.cos.shape[-1] // 2
        return self.cos[..., :half], self.signed_sin[..., half:]

    def scale(self, queries: torch.Tensor) -> torch.Tensor:
        """Scales queries, [T, H, D], by their positions if the model does."""
        return queries if self.query_scale is None else queries * self.query_scale


class RotaryEmbedding(nn.Module):
    """Looks up each position's rotation, once a step for all layers."""

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        super().__init__()
        frequencies = inverse_frequencies(rotary_dim(head_dim, rope), rope)
        angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * frequencies
        # Elements that are not rotated end each half: see models.layers.rotary_heads.
        kept = (0, head_dim // 2 - len(frequencies))
        cos = functional.pad(angles.cos() * rope.table_scale, kept, value=1.0)
        sin = functional.pad(angles.sin() * rope.table_scale, kept)
        # Computed in float32 and rounded once to the model's dtype, as transformers does.
        table = torch.cat((cos, cos, -sin, sin), dim=-1).to(torch.get_default_dtype())
        self.register_buffer("table", table.unsqueeze(1), persistent=False)
        self.table: torch.Tensor
        scale = None if rope.query_scale is None else _query_scale(max_positions, rope.query_scale)
        self.register_buffer("query_scale", scale, persistent=False)
        self.query_scale: torch.Tensor | None
        axes = functional.pad(torch.tensor(rope.axes, dtype=torch.int64), kept).repeat(4)
        self.register_buffer("axes", axes if rope.axes else None, persistent=False)
        self.axes: torch.Tensor | None

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Maps [T] positions to their rotation."""
        cos, signed_sin = self._rows(positions).chunk(2, dim=-1)
        if self.query_scale is None:
            return Rotation(cos, signed_sin)
        return Rotation(cos, signed_sin, self.query_scale.index_select(0, positions))

    def _rows(self, positions: torch.Tensor) -> torch.Tensor:
        if self.axes is None:
            return self.table.index_select(0, positions)
        return rotation_rows(self.table, positions, self.axes)


def _query_scale(max_positions: int, scale: QueryScale) -> torch.Tensor:
    """Returns the factor of queries at each position, [max_positions, 1, 1]."""
    first = 1 if scale.is_of_unrotated else 0
    spans = torch.arange(first, max_positions + first).div(scale.span, rounding_mode="floor")
    factors = 1.0 + scale.rate * torch.log1p(spans.float())
    return factors.to(torch.get_default_dtype()).view(-1, 1, 1)


def rotary_dim(head_dim: int, rope: RopeConfig) -> int:
    """Returns how many elements of a head are rotated.

    Raises:
        ValueError: the rotated or the other elements cannot be halved.
    """
    size = int(head_dim * rope.partial_rotary_factor)
    if rope.rope_type == "proportional":
        size = head_dim
    if size < 2 or size % 2 or head_dim % 2:
        raise ValueError(f"{size} of {head_dim} elements of a head cannot be rotated in pairs")
    return size


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Returns the angle per position of each pair, in radians: [D / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "proportional":
        frequencies[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
        return frequencies / rope.factor
    if rope.rope_type == "longrope":
        is_long = rope.longest > rope.original_max_position_embeddings
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slows long wavelengths by `factor`, keeps short ones, and blends in between.

    Source: Llama 3.1 reference code, apply_scaling, in meta-llama/llama-models.
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)


def _yarn_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slows pairs that turn less than beta_slow times by `factor`, keeps those past beta_fast.

    In between it blends, by the index of the pair. Source: Peng et al. 2023, "YaRN", section 3.2.
    """
    num_pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        """Returns the index, not rounded, of the pair that turns this often in the context."""
        original = rope.original_max_position_embeddings
        return num_pairs * math.log(original / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed + slowed / rope.factor)
