"""Rotary positions in config.json."""

import math
from dataclasses import dataclass, replace

from models.config_sections.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    rope_type llama3 uses low_freq_factor and high_freq_factor; yarn uses beta_fast, beta_slow,
    truncate and the two scales; both use original_max_position_embeddings.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    """Turns within the original context from which a pair keeps its frequency."""
    beta_slow: float = 1.0
    """Turns up to which a pair is slowed by the whole factor."""
    truncate: bool = True
    """Whether yarn blends between whole pair indices."""
    table_scale: float = 1.0
    """Factor of the cosines and sines."""
    score_scale: float = 1.0
    """Factor of the attention scores, on top of 1 / sqrt(head size); latent attention only."""
    partial_rotary_factor: float = 1.0
    """Share of each head that is rotated, from its start."""
    is_interleaved: bool = False
    """Whether neighbours form a pair, not (i, i + D / 2)."""


def read_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Raises:
        ConfigError: a field is ill-typed, or the kind of scaling is not supported.
    """
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    scaling = fields.section(name)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise fields.error(name, "one for all layers")
    theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta", 10_000.0)
    type_name = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    rope_type = scaling.choice(type_name, ROPE_TYPES, "default")
    section = scaling if scaling.has("partial_rotary_factor") else fields
    partial = section.number("partial_rotary_factor", 1.0)
    if partial > 1.0:
        raise section.error("partial_rotary_factor", "at most 1")
    plain = RopeConfig(
        theta=theta, partial_rotary_factor=partial, is_interleaved=fields.flag("rope_interleave")
    )
    # Dynamic scaling begins past max_position_embeddings, which no sequence exceeds here.
    if rope_type in ("default", "dynamic"):
        return plain
    if rope_type == "yarn":
        return _read_yarn(scaling, max_position_embeddings, plain)
    scaled = replace(plain, rope_type=rope_type, factor=scaling.number("factor"))
    if rope_type == "linear":
        return scaled
    return replace(
        scaled,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.count("original_max_position_embeddings"),
    )


def _read_yarn(scaling: Fields, max_position_embeddings: int, plain: RopeConfig) -> RopeConfig:
    """Reads YaRN's parameters and computes its two scales.

    Source: Peng et al. 2023, "YaRN", section 3.4; mscale and mscale_all_dim are DeepSeek-V2's.
    """
    original = scaling.count("original_max_position_embeddings")
    factor = scaling.number("factor", max_position_embeddings / original)
    mscale, mscale_all_dim = (
        scaling.number(name) if scaling.values.get(name) else 0.0
        for name in ("mscale", "mscale_all_dim")
    )
    if mscale and mscale_all_dim:
        table_scale = _sharpening(factor, mscale) / _sharpening(factor, mscale_all_dim)
    else:
        table_scale = _sharpening(factor, 1.0)
    return replace(
        plain,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", default=True),
        table_scale=scaling.number("attention_factor", table_scale),
        score_scale=_sharpening(factor, mscale_all_dim) ** 2,
    )


def _sharpening(factor: float, weight: float) -> float:
    """Returns the square root of the factor that stretched positions' scores need."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
