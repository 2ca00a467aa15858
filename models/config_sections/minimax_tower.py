"""The encoder of images of MiniMax M3 in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    QwenVisionConfig,
    TowerDefaults,
    VisionConfig,
    read_colours,
    read_shape,
)

_DEFAULTS = TowerDefaults(200025, 32, 1280, 5120, 16, 14, ("gelu",), head_multiple=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxVisionConfig(QwenVisionConfig):
    """Shape of MiniMax M3's tower, and of the projector that merges its patches.

    projector_size: inner elements of the projector.
    """

    projector_size: int
    norm_eps: float

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that turn: a third each by time, row and column, in pairs."""
        return self.head_dim // 6 * 6


def read_minimax(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    """Reads the tower from the whole, its text and this part."""
    rope = fields.section("rope_parameters")
    rope.choice("rope_type", ("axial",), "axial")
    return MiniMaxVisionConfig(
        **read_shape(whole, text, fields, _DEFAULTS),
        merge=fields.count("spatial_merge_size", 2),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        num_frames=fields.count("temporal_patch_size", 2),
        projector_size=whole.count("projector_hidden_size", 6144),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
    )
