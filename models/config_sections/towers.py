"""Encoders of images in config.json, family by family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    VisionConfig,
    read_colours,
    read_heads,
    read_image_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """Shape of a tower of Qwen's: patches of several frames, rotated by row and column.

    num_frames: frames of a patch; images repeat their only one.
    """

    rope_theta: float
    num_frames: int


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


def _read_out_size(fields: Fields, text: Fields) -> int:
    """Reads the elements of a vector, which are as many as a token's."""
    hidden_size = text.count("hidden_size")
    if fields.count("out_hidden_size", 3584) != hidden_size:
        raise fields.error("out_hidden_size", f"{hidden_size}, the hidden size of the text")
    return hidden_size


def _read_theta(fields: Fields) -> float:
    return fields.section("rope_parameters").number("rope_theta", 10_000.0)


_READERS: Mapping[str, Callable[[Fields, Fields, Fields], VisionConfig]] = {
    "Qwen2_5_VLForConditionalGeneration": _read_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _read_qwen3_vl,
}
"""Class of a whole model -> reader of its encoder, from the whole, its text and this part."""
