"""The encoder of Gemma 3 in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    HALF,
    MutualLayers,
    TileVisionConfig,
    read_colours,
    read_heads,
    read_image_token,
)

NUM_MARKS = 4
"""Tokens around the vectors of an image: a start, an end, and line breaks before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3VisionConfig(TileVisionConfig):
    """Shape of SigLIP's tower in Gemma 3, which sees images as one tile.

    merge: patches on each side of the square whose mean becomes one vector.
    """

    def check_tiles(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless a grid is that of one tile."""
        TileVisionConfig.check_tiles(self, grid)
        if grid[0] != 1:
            raise ValueError("an image has one tile")

    @property
    def max_whole_tokens(self) -> int:
        """Most tokens of an image that one step computes."""
        return (self.side // self.merge) ** 2 + NUM_MARKS

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of any image."""
        return 1, self.side, self.side


def read_gemma3(whole: Fields, text: Fields, fields: Fields) -> Gemma3VisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    hidden_size, patch_size = fields.count("hidden_size", 768), fields.count("patch_size", 16)
    side = fields.count("image_size", 224) // patch_size
    vectors_per_side = int(whole.count("mm_tokens_per_image", 256) ** 0.5)
    if not side or side % vectors_per_side:
        raise whole.error("mm_tokens_per_image", f"the square of a divisor of {side} patches")
    return Gemma3VisionConfig(
        image_token_id=read_image_token(whole, 262144),
        num_layers=fields.count("num_hidden_layers", 12),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 3072),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 12),
        out_size=text.count("hidden_size"),
        patch_size=patch_size,
        merge=side // vectors_per_side,
        hidden_act=fields.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        colours=read_colours(whole, HALF, HALF),
        side=side,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        has_bias=False,
        mutual_layers=MutualLayers.ALL,
    )
