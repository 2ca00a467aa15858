"""Encoders of images in config.json, family by family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.gemma_towers import (
    read_gemma3,
    read_gemma4_unified,
    read_gemma4_vision,
)
from models.config_sections.hy_v4_tower import read_hy_v4
from models.config_sections.kimi_tower import read_kimi
from models.config_sections.llava_towers import (
    read_llava,
    read_llava_next,
    read_llava_onevision,
)
from models.config_sections.minimax_tower import read_minimax
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    QwenVisionConfig,
    TileVisionConfig,
    VisionConfig,
    check_feature_layer,
    read_colours,
    read_heads,
    read_image_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLVisionConfig(QwenVisionConfig):
    """Shape of the tower of Qwen3-VL and Qwen3.5.

    num_positions: learned positions, a square.
    deepstack_layers: layers whose outputs are added after the first layers of the text.
    """

    num_positions: int
    deepstack_layers: tuple[int, ...]

    @property
    def num_levels(self) -> int:
        """Layers of the text after which further vectors are added."""
        return len(self.deepstack_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLVisionConfig(QwenVisionConfig):
    """Shape of the tower of Qwen2.5-VL.

    window: vectors on each side of a window, within which patches attend.
    whole_layers: layers without windows.
    """

    window: int
    whole_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLVisionConfig(QwenVisionConfig):
    """Shape of the tower of Qwen2-VL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vVisionConfig(QwenVisionConfig):
    """Shape of the tower of GLM-4V.

    num_positions: learned positions, a square.
    merger_size: inner elements of the layers that make vectors.
    has_bias: of the projections to queries, keys and values.
    """

    num_positions: int
    merger_size: int
    norm_eps: float
    has_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVisionConfig(VisionConfig):
    """Shape of Pixtral's tower, and of the projector that merges its patches.

    norm_eps: of the projector, as in the text.
    has_bias: whether the projector adds one.
    """

    rope_theta: float
    norm_eps: float
    has_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLVisionConfig(TileVisionConfig):
    """Shape of InternVL's tower.

    has_bias: of the projections to queries, keys and values.
    has_qk_norm: whether these are normalised, all heads together.
    has_rms_norm: whether layers divide by the root mean square, and subtract no mean.
    has_last_norm: whether the last layer's output is normalised.
    """

    has_qk_norm: bool
    has_rms_norm: bool
    has_last_norm: bool


def read_vision(whole: Fields, text: Fields) -> VisionConfig | None:
    """Reads the encoder of a model of several parts; None without one that is served.

    Args:
        whole: fields of the whole model.
        text: of its text part.

    Raises:
        ConfigError: a field is missing or ill-typed, or its value is not supported.
    """
    fields = whole.section("vision_config")
    read = _READERS.get(whole.architecture())
    return read(whole, text, fields) if read is not None and fields.values else None


def _read_qwen3_vl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    hidden_act = fields.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    num_layers, hidden_size = fields.count("depth", 27), fields.count("hidden_size", 1152)
    deepstack = fields.layer_numbers("deepstack_visual_indexes")
    if list(deepstack) != sorted(set(deepstack)) or max(deepstack, default=0) >= num_layers:
        raise fields.error("deepstack_visual_indexes", f"rising numbers below {num_layers}")
    num_positions = fields.count("num_position_embeddings", 2304)
    if int(num_positions**0.5) ** 2 != num_positions:
        raise fields.error("num_position_embeddings", "a square")
    return Qwen3VLVisionConfig(
        image_token_id=read_image_token(whole, 151655),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 4304),
        num_heads=read_heads(fields, hidden_size, "num_heads", 16, multiple=4),
        out_size=_read_out_size(fields, text),
        patch_size=fields.count("patch_size", 16),
        merge=fields.count("spatial_merge_size", 2),
        hidden_act=hidden_act,
        colours=read_colours(whole, HALF, HALF),
        rope_theta=_read_theta(fields),
        num_frames=fields.count("temporal_patch_size", 2),
        num_positions=num_positions,
        deepstack_layers=deepstack,
    )


def _read_qwen2_5_vl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    hidden_act = fields.choice("hidden_act", ("silu",), "silu")
    hidden_size = fields.count("hidden_size", 3584)
    patch_size, merge = fields.count("patch_size", 14), fields.count("spatial_merge_size", 2)
    window = fields.count("window_size", 112) // merge // patch_size
    if not window:
        raise fields.error("window_size", f"at least {merge * patch_size}")
    defaults = {"fullatt_block_indexes": [7, 15, 23, 31]}
    return Qwen25VLVisionConfig(
        image_token_id=read_image_token(whole, 151655),
        num_layers=fields.count("depth", 32),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 3420),
        num_heads=read_heads(fields, hidden_size, "num_heads", 16, multiple=4),
        out_size=_read_out_size(fields, text),
        patch_size=patch_size,
        merge=merge,
        hidden_act=hidden_act,
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=_read_theta(fields),
        num_frames=fields.count("temporal_patch_size", 2),
        window=window,
        whole_layers=fields.with_defaults(defaults).layer_numbers("fullatt_block_indexes"),
    )


def _read_qwen2_vl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    hidden_size = fields.count("embed_dim", 1280)
    out_size = text.count("hidden_size")
    if fields.count("hidden_size", 3584) != out_size:
        raise fields.error("hidden_size", f"{out_size}, the hidden size of the text")
    return Qwen2VLVisionConfig(
        image_token_id=read_image_token(whole, 151655),
        num_layers=fields.count("depth", 32),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * int(fields.number("mlp_ratio", 4)),
        num_heads=read_heads(fields, hidden_size, "num_heads", 16, multiple=4),
        out_size=out_size,
        patch_size=fields.count("patch_size", 14),
        merge=fields.count("spatial_merge_size", 2),
        hidden_act=fields.choice("hidden_act", ("quick_gelu",), "quick_gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=_read_theta(fields),
        num_frames=fields.count("temporal_patch_size", 2),
    )


def _read_glm4v(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    hidden_size, patch_size = fields.count("hidden_size", 1536), fields.count("patch_size", 14)
    is_moe = whole.architecture() == "Glm4vMoeForConditionalGeneration"
    return Glm4vVisionConfig(
        image_token_id=read_image_token(whole, 151363 if is_moe else 151343),
        num_layers=fields.count("depth", 24),
        hidden_size=hidden_size,
        intermediate_size=fields.count("out_hidden_size", 4096),
        num_heads=read_heads(fields, hidden_size, "num_heads", 12, multiple=4),
        out_size=_read_out_size(fields, text),
        patch_size=patch_size,
        merge=fields.count("spatial_merge_size", 2),
        hidden_act=fields.choice("hidden_act", ("silu",), "silu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=_read_theta(fields),
        num_frames=fields.count("temporal_patch_size", 2),
        num_positions=(fields.count("image_size", 336) // patch_size) ** 2,
        merger_size=fields.count("intermediate_size", 13696),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        has_bias=fields.flag("attention_bias"),
    )


def _read_out_size(fields: Fields, text: Fields) -> int:
    """Reads the elements of a vector, which are as many as a token's."""
    hidden_size = text.count("hidden_size")
    if fields.count("out_hidden_size", 3584) != hidden_size:
        raise fields.error("out_hidden_size", f"{hidden_size}, the hidden size of the text")
    return hidden_size


def _read_theta(fields: Fields) -> float:
    return fields.section("rope_parameters").number("rope_theta", 10_000.0)


def _read_pixtral(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    check_feature_layer(whole)
    hidden_size = fields.count("hidden_size", 1024)
    return PixtralVisionConfig(
        image_token_id=read_image_token(whole, 10),
        num_layers=fields.count("num_hidden_layers", 24),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 4096),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16, multiple=4),
        out_size=text.count("hidden_size"),
        patch_size=fields.count("patch_size", 14),
        merge=whole.count("spatial_merge_size", 2),
        hidden_act=fields.choice("hidden_act", ("gelu", "silu"), "gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=_read_theta(fields),
        norm_eps=text.number("rms_norm_eps"),
        has_bias=whole.flag("multimodal_projector_bias"),
    )


def _read_internvl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    check_feature_layer(whole)
    whole.choice("vision_feature_select_strategy", ("default",), "default")
    if not fields.flag("use_absolute_position_embeddings", default=True):
        raise fields.error("use_absolute_position_embeddings", "true")
    hidden_size, patch_size = (
        fields.count("hidden_size", 1024),
        _read_side(fields, "patch_size", 14),
    )
    merge = int(1 / whole.number("downsample_ratio", 0.5))
    side = _read_side(fields, "image_size", 448) // patch_size
    if not merge or side % merge:
        raise whole.error("downsample_ratio", f"one that divides {side} patches")
    return InternVLVisionConfig(
        image_token_id=read_image_token(whole, 151667),
        num_layers=fields.count("num_hidden_layers", 24),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 4096),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16),
        out_size=text.count("hidden_size"),
        patch_size=patch_size,
        merge=merge,
        hidden_act=fields.choice("hidden_act", ("gelu",), "gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        side=side,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        has_bias=fields.flag("attention_bias"),
        has_qk_norm=fields.flag("use_qk_norm"),
        has_rms_norm=fields.choice("norm_type", _NORMS, "layer_norm") == "rms_norm",
        has_last_norm=not fields.flag("use_mean_pooling", default=True),
    )


def _read_side(fields: Fields, name: str, default: int) -> int:
    """Reads the side of a square, given once or twice."""
    value = fields.values.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        fields = Fields(fields.file, {name: value[0]}, fields.prefix)
    return fields.count(name, default)


_NORMS = ("layer_norm", "rms_norm")

_READERS: Mapping[str, Callable[[Fields, Fields, Fields], VisionConfig]] = {
    "Gemma3ForConditionalGeneration": read_gemma3,
    "Gemma4ForConditionalGeneration": read_gemma4_vision,
    "Gemma4UnifiedForConditionalGeneration": read_gemma4_unified,
    "Glm4vForConditionalGeneration": _read_glm4v,
    "Glm4vMoeForConditionalGeneration": _read_glm4v,
    "HYV4VLForConditionalGeneration": read_hy_v4,
    "InternVLForConditionalGeneration": _read_internvl,
    "KimiK25ForConditionalGeneration": read_kimi,
    "Kimi_K25ForConditionalGeneration": read_kimi,
    "LlavaForConditionalGeneration": read_llava,
    "LlavaNextForConditionalGeneration": read_llava_next,
    "LlavaOnevisionForConditionalGeneration": read_llava_onevision,
    "MiniMaxM3SparseForConditionalGeneration": read_minimax,
    "Mistral3ForConditionalGeneration": _read_pixtral,
    "Qwen2VLForConditionalGeneration": _read_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": _read_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _read_qwen3_vl,
}
"""Class of a whole model -> reader of its encoder, from the whole, its text and this part."""
