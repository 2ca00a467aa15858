"""Encoders of images in config.json, family by family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    TowerDefaults,
    VisionConfig,
    check_feature_layer,
    read_colours,
    read_shape,
)

_TANH = ("gelu_pytorch_tanh",)
_QWEN_3_VL = TowerDefaults(151655, 27, 1152, 4304, 16, 16, _TANH, head_multiple=4)
_QWEN_2_5_VL = TowerDefaults(151655, 32, 3584, 3420, 16, 14, ("silu",), head_multiple=4)
_QWEN_2_VL = TowerDefaults(151655, 32, 1280, 5120, 16, 14, ("quick_gelu",), head_multiple=4)
_GLM_4V = TowerDefaults(151343, 24, 1536, 13696, 12, 14, ("silu",), head_multiple=4)
_GLM_4V_MOE = _GLM_4V._replace(image_token_id=151363)
_PIXTRAL = TowerDefaults(10, 24, 1024, 4096, 16, 14, ("gelu", "silu"), head_multiple=4)
_INTERN_VL = TowerDefaults(151667, 24, 1024, 4096, 16, 14, ("gelu",))


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


def _read_qwen(
    whole: Fields, text: Fields, fields: Fields, defaults: TowerDefaults
) -> dict[str, Any]:
    """Returns the fields of `QwenVisionConfig` but its colours."""
    return {
        **read_shape(whole, text, fields, defaults, names=("depth", "num_heads")),
        "out_size": _read_out_size(fields, text),
        "merge": fields.count("spatial_merge_size", 2),
        "rope_theta": _read_theta(fields),
        "num_frames": fields.count("temporal_patch_size", 2),
    }


def _read_qwen3_vl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    shape = _read_qwen(whole, text, fields, _QWEN_3_VL)
    deepstack = fields.layer_numbers("deepstack_visual_indexes")
    most = shape["num_layers"]
    if list(deepstack) != sorted(set(deepstack)) or max(deepstack, default=0) >= most:
        raise fields.error("deepstack_visual_indexes", f"rising numbers below {most}")
    num_positions = fields.count("num_position_embeddings", 2304)
    if int(num_positions**0.5) ** 2 != num_positions:
        raise fields.error("num_position_embeddings", "a square")
    return Qwen3VLVisionConfig(
        **shape,
        colours=read_colours(whole, HALF, HALF),
        num_positions=num_positions,
        deepstack_layers=deepstack,
    )


def _read_qwen2_5_vl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    shape = _read_qwen(whole, text, fields, _QWEN_2_5_VL)
    pixels = shape["merge"] * shape["patch_size"]
    window = fields.count("window_size", 112) // pixels
    if not window:
        raise fields.error("window_size", f"at least {pixels}")
    defaults = {"fullatt_block_indexes": [7, 15, 23, 31]}
    return Qwen25VLVisionConfig(
        **shape,
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        window=window,
        whole_layers=fields.with_defaults(defaults).layer_numbers("fullatt_block_indexes"),
    )


def _read_qwen2_vl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    hidden_size, out_size = fields.count("embed_dim", 1280), text.count("hidden_size")
    if fields.count("hidden_size", 3584) != out_size:
        raise fields.error("hidden_size", f"{out_size}, the hidden size of the text")
    inner_size = hidden_size * int(fields.number("mlp_ratio", 4))
    # Its names of these are those of a vector in other towers.
    own = {"hidden_size": hidden_size, "intermediate_size": inner_size, "out_hidden_size": out_size}
    named = Fields(fields.file, fields.values | own, fields.prefix)
    shape = _read_qwen(whole, text, named, _QWEN_2_VL)
    return Qwen2VLVisionConfig(**shape, colours=read_colours(whole, CLIP_MEAN, CLIP_STD))


def _read_glm4v(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    is_moe = whole.architecture() == "Glm4vMoeForConditionalGeneration"
    shape = _read_qwen(whole, text, fields, _GLM_4V_MOE if is_moe else _GLM_4V)
    return Glm4vVisionConfig(
        **{**shape, "intermediate_size": fields.count("out_hidden_size", 4096)},
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        num_positions=(fields.count("image_size", 336) // shape["patch_size"]) ** 2,
        merger_size=shape["intermediate_size"],
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
    return PixtralVisionConfig(
        **read_shape(whole, text, fields, _PIXTRAL),
        merge=whole.count("spatial_merge_size", 2),
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
    patch_size = _read_side(fields, "patch_size", 14)
    fields = Fields(fields.file, fields.values | {"patch_size": patch_size}, fields.prefix)
    merge = int(1 / whole.number("downsample_ratio", 0.5))
    side = _read_side(fields, "image_size", 448) // patch_size
    if not merge or side % merge:
        raise whole.error("downsample_ratio", f"one that divides {side} patches")
    return InternVLVisionConfig(
        **read_shape(whole, text, fields, _INTERN_VL),
        merge=merge,
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
