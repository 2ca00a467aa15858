"""The encoder of images of Hy4 in config.json."""

from dataclasses import dataclass
from math import isqrt, prod

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    VisionConfig,
    read_colours,
    read_heads,
    read_image_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyV4VisionConfig(VisionConfig):
    """Shape of Hy4's tower, whose vectors come in rows that end with one of their own.

    side: learned positions on each side of a square.
    """

    side: int
    norm_eps: float

    def sides(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """Returns rows and columns of an image's vectors, the ends of rows among them."""
        height, width = grid
        return height // self.merge, width // self.merge + 1

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns the vectors that an image becomes."""
        return prod(self.sides(grid))

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of an image of about as many vectors, and no more unless it is one."""
        side = max(1, (isqrt(4 * max_vectors + 1) - 1) // 2) * self.merge
        return side, side


def read_hy_v4(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    """Reads the tower from the whole, its text and this part."""
    hidden_size, patch_size = fields.count("hidden_size", 1536), fields.count("patch_size", 16)
    fields.choice("interpolate_mode", ("bilinear",), "bilinear")
    out_size = text.count("hidden_size")
    if fields.count("out_hidden_size", 6144) != out_size:
        raise fields.error("out_hidden_size", f"{out_size}, the hidden size of the text")
    return HyV4VisionConfig(
        image_token_id=read_image_token(whole, 120120),
        num_layers=fields.count("num_hidden_layers", 40),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 6144),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16),
        out_size=out_size,
        patch_size=patch_size,
        merge=fields.count("spatial_merge_size", 2),
        hidden_act=fields.choice("hidden_act", ("gelu",), "gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        side=max(1, fields.count("max_image_size", 2048) // patch_size),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
    )
