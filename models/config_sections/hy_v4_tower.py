"""The encoder of images of Hy4 in config.json."""

from dataclasses import dataclass
from math import isqrt, prod

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    TowerDefaults,
    VisionConfig,
    read_colours,
    read_shape,
)

_NAMES = {"attention_heads": "num_attention_heads", "layer_norm_eps": "rms_norm_eps"}
"""Another name of a field -> the name that transformers writes."""
_DEFAULTS = TowerDefaults(120120, 40, 1536, 6144, 16, 16, ("gelu",))


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
    fields = fields.renamed(_NAMES)
    shape = read_shape(whole, text, fields, _DEFAULTS)
    fields.choice("interpolate_mode", ("bilinear",), "bilinear")
    if fields.count("out_hidden_size", 6144) != shape["out_size"]:
        raise fields.error("out_hidden_size", f"{shape['out_size']}, the hidden size of the text")
    return HyV4VisionConfig(
        **shape,
        merge=fields.count("spatial_merge_size", 2),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        side=max(1, fields.count("max_image_size", 2048) // shape["patch_size"]),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
    )
