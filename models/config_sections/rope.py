"""Rotary positions in config.json."""

import math
from dataclasses import dataclass, replace

from models.config_sections.families import FAMILIES_WITH_COMPRESSION
from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")

_LAYER_KINDS = ("full_attention", "sliding_attention")

_FAMILIES_WITH_PARTS = (
    *GEMMA_4,
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "SolarOpenForCausalLM",
)
"""Families that rotate a part of each head if config.json says so, as their modules do.

Others pass over partial_rotary_factor, which files of latent attention have for the part of a head
that is rotated as a whole.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Growth of queries with their position p: times 1 + rate * log(1 + floor(p / span)).

    is_of_unrotated: only layers without positions have it, and p counts from one.

    Source: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention"; Llama 4, Ministral 3.
    """

    rate: float
    span: int
    """In tokens."""
    is_of_unrotated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    rope_type llama3 uses low_freq_factor and high_freq_factor; yarn uses beta_fast, beta_slow,
    truncate and the two scales; longrope uses the two lists of factors and longest; all three use
    original_max_position_embeddings. proportional has pairs of all elements, some of frequency
    0, which does not rotate.
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
    short_factors: tuple[float, ...] = ()
    """By which each pair is slowed if no sequence is longer than the original context."""
    long_factors: tuple[float, ...] = ()
    """By which each pair is slowed otherwise."""
    longest: int = 0
    """Longest sequence, in tokens."""
    query_scale: QueryScale | None = None
    axes: tuple[int, ...] = ()
    """For each rotated pair, whether it turns by the position in time (0), height (1) or width (2);
    empty: all turn by the position in the sequence."""


def read_ropes(
    fields: Fields, max_position_embeddings: int, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Where a file has both, `rope_scaling` is what its owner added; as in transformers it counts.

    Returns:
        The rotation of layers; and that of layers with a window, if it is another.

    Raises:
        ConfigError: a field is ill-typed, or the kind of scaling is not supported.
    """
    name = "rope_scaling" if fields.section("rope_scaling").values else "rope_parameters"
    scaling = fields.section(name)
    if fields.architecture() in FAMILIES_WITH_COMPRESSION:
        return _read_compressed(fields, scaling, max_position_embeddings, head_dim)
    has_local = fields.has("rope_local_base_freq")
    local_theta = fields.number("rope_local_base_freq") if has_local else None
    both = fields.section("rope_parameters")
    may_differ = has_local or _has_kinds(fields)
    if name == "rope_scaling" and may_differ and _kinds(both):
        # Added scaling is that of layers without a window.
        widened = {**both.section("full_attention").values, **scaling.values}
        scaling = Fields(fields.file, {**both.values, "full_attention": widened}, scaling.prefix)
    kinds = _kinds(scaling)
    if kinds:
        if not set(_LAYER_KINDS) >= set(kinds) or not may_differ:
            raise fields.error(name, "one for all layers")
        full, sliding = (scaling.section(kind) for kind in _LAYER_KINDS)
        return (
            _read_rope(fields, full, max_position_embeddings, head_dim),
            _read_rope(fields, sliding, max_position_embeddings, head_dim, theta=local_theta),
        )
    rope = _read_rope(fields, scaling, max_position_embeddings, head_dim)
    if _has_plain_windows(fields) and rope.rope_type != "default":
        return rope, RopeConfig(theta=rope.theta)
    if local_theta is None:
        return rope, None
    partial = rope.partial_rotary_factor
    return rope, RopeConfig(theta=local_theta, partial_rotary_factor=partial)


def _read_compressed(
    fields: Fields, scaling: Fields, max_position_embeddings: int, head_dim: int
) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotation of layers with compressed keys, and that of others.

    head_dim: the rotated elements of a head. Cosines and sines are never scaled.
    """
    main, compressed = scaling.section("main"), scaling.section("compress")
    if not compressed.values:
        theta = fields.number("compress_rope_theta")
        compressed = Fields(fields.file, {**scaling.values, "rope_theta": theta}, scaling.prefix)
    local_theta = (main if main.has("rope_theta") else fields).number("rope_theta", 10_000.0)
    rope = _read_rope(fields, compressed, max_position_embeddings, head_dim)
    rope = replace(rope, partial_rotary_factor=1.0, is_interleaved=True)
    if rope.rope_type == "yarn":
        factor = compressed.number("attention_factor", 1.0)
        rope = replace(rope, table_scale=factor, score_scale=1.0)
    return rope, RopeConfig(theta=local_theta, is_interleaved=True)


def _has_plain_windows(fields: Fields) -> bool:
    """Returns whether a family scales the rotation of layers without a window only."""
    return fields.architecture() == "Olmo3ForCausalLM"


def _has_kinds(fields: Fields) -> bool:
    """Returns whether files of a family have a section for each kind of layers."""
    has_kinds = (*GEMMA_4, "MiMoV2FlashForCausalLM")
    return _has_plain_windows(fields) or fields.architecture() in has_kinds


def _kinds(scaling: Fields) -> list[str]:
    """Returns the kinds of layers that have sections of their own."""
    return [key for key, value in scaling.values.items() if isinstance(value, dict)]


def _read_rope(
    fields: Fields,
    scaling: Fields,
    max_position_embeddings: int,
    head_dim: int,
    *,
    theta: float | None = None,
) -> RopeConfig:
    """Reads one section of scaling; theta is by default that of all layers."""
    if scaling.has("rope_theta") or theta is None:
        theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta", 10_000.0)
    type_name = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    if scaling.values.get(type_name) == "su":  # its name in Phi-3's first files
        rope_type = "longrope"
    elif scaling.values.get(type_name) == "mrope":  # plain for text; see text_part
        rope_type = "default"
    else:
        rope_type = scaling.choice(type_name, ROPE_TYPES, "default")
    plain = RopeConfig(
        theta=theta,
        partial_rotary_factor=_rotated_share(fields, scaling, head_dim, rope_type),
        is_interleaved=fields.flag("rope_interleave"),
        query_scale=_read_query_scale(fields, scaling),
    )
    # Dynamic scaling begins past max_position_embeddings, which no sequence exceeds here.
    if rope_type in ("default", "dynamic"):
        return plain
    name = "original_max_position_embeddings"
    original = (fields if fields.has(name) else scaling).count(name, max_position_embeddings)
    if rope_type == "yarn":
        return _read_yarn(scaling, original, max_position_embeddings, plain)
    if rope_type == "longrope":
        num_pairs = int(head_dim * plain.partial_rotary_factor) // 2
        return _read_longrope(scaling, original, max_position_embeddings, num_pairs, plain)
    factor = scaling.number("factor", 1.0 if rope_type == "proportional" else None)
    scaled = replace(plain, rope_type=rope_type, factor=factor)
    if rope_type in ("linear", "proportional"):
        return scaled
    return replace(
        scaled,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=original,
    )


def _rotated_share(fields: Fields, scaling: Fields, head_dim: int, rope_type: str) -> float:
    """Reads the share of a head that is rotated."""
    section = scaling if scaling.has("partial_rotary_factor") else fields
    share = fields.count("rotary_dim") / head_dim if fields.has("rotary_dim") else 1.0
    partial = section.number("partial_rotary_factor", share)
    if partial > 1.0:
        raise section.error("partial_rotary_factor", "at most 1")
    if fields.architecture() not in _FAMILIES_WITH_PARTS:
        return 1.0
    size = int(head_dim * partial)
    if partial < 1.0 and rope_type != "proportional" and (size < 2 or size % 2):
        raise section.error("partial_rotary_factor", f"pairs of the {head_dim} elements of a head")
    return partial


def _read_query_scale(fields: Fields, scaling: Fields) -> QueryScale | None:
    """Reads how queries grow with their position; None if they do not."""
    if fields.architecture() == "Llama4ForCausalLM":
        # The first files have a number, for true.
        if not fields.values.get("attn_temperature_tuning", True):
            return None
        rate = fields.number("attn_scale", or_zero=True)
        return QueryScale(rate=rate, span=fields.count("floor_scale"), is_of_unrotated=True)
    if not scaling.has("llama_4_scaling_beta"):
        return None
    rate = scaling.number("llama_4_scaling_beta", or_zero=True)
    return QueryScale(rate=rate, span=scaling.count("original_max_position_embeddings"))


def _read_yarn(
    scaling: Fields, original: int, max_position_embeddings: int, plain: RopeConfig
) -> RopeConfig:
    """Reads YaRN's parameters and computes its two scales.

    Source: Peng et al. 2023, "YaRN", section 3.4; mscale and mscale_all_dim are DeepSeek-V2's.
    """
    factor = scaling.number("factor", max_position_embeddings / original)
    mscale, mscale_all_dim = (
        scaling.number(name, 0.0, or_zero=True) for name in ("mscale", "mscale_all_dim")
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


def _read_longrope(
    scaling: Fields,
    original: int,
    max_position_embeddings: int,
    num_pairs: int,
    plain: RopeConfig,
) -> RopeConfig:
    """Reads the factors of each pair, and computes the scale of the table.

    Source: Ding et al. 2024, "LongRoPE"; the scale is Phi-3's.
    """
    stretch = scaling.number("factor", max_position_embeddings / original)
    table_scale = 1.0
    if stretch > 1.0 and not scaling.has("attention_factor"):
        if original < 2:
            raise scaling.error("original_max_position_embeddings", "at least 2")
        table_scale = math.sqrt(1.0 + math.log(stretch) / math.log(original))
    return replace(
        plain,
        rope_type="longrope",
        original_max_position_embeddings=original,
        table_scale=scaling.number("attention_factor", table_scale),
        short_factors=scaling.numbers("short_factor", num_pairs),
        long_factors=scaling.numbers("long_factor", num_pairs),
        longest=max_position_embeddings,
    )


def _sharpening(factor: float, weight: float) -> float:
    """Returns the square root of the factor that stretched positions' scores need."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
