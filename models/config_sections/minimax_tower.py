"""The encoder of images of MiniMax M3 in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    QwenVisionConfig,
    VisionConfig,
    read_colours,
    read_heads,
    read_image_token,
)


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
    hidden_size = fields.count("hidden_size", 1280)
    rope = fields.section("rope_parameters")
    rope.choice("rope_type", ("axial",), "axial")
    return MiniMaxVisionConfig(
        image_token_id=read_image_token(whole, 200025),
        num_layers=fields.count("num_hidden_layers", 32),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 5120),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16, multiple=2),
        out_size=text.count("hidden_size"),
        patch_size=fields.count("patch_size", 14),
        merge=fields.count("spatial_merge_size", 2),
        hidden_act=fields.choice("hidden_act", ("gelu",), "gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        num_frames=fields.count("temporal_patch_size", 2),
        projector_size=whole.count("projector_hidden_size", 6144),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
    )
