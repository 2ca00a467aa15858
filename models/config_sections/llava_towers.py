"""The encoder of LLaVA-OneVision in config.json."""

from dataclasses import dataclass
from math import prod

from models.config_sections.fields import Fields
from models.config_sections.tile_layout import TileLayout
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    TileVisionConfig,
    check_feature_layer,
    check_sides,
    read_colours,
    read_heads,
    read_image_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionVisionConfig(TileVisionConfig):
    """Shape of SigLIP's tower in LLaVA-OneVision.

    has_bias: of the projector.
    resolutions: heights and widths, in pixels, that images are resized to before they are tiled.
    max_tiles: tiles' worth of vectors of an image, beside its overview; more are resized.
    """

    resolutions: tuple[tuple[int, int], ...]
    max_tiles: int

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless a grid is tiles, their height and width, and the image's pixels.

        An image of one tile has the overview alone, whatever its size.
        """
        check_sides(grid, 5)
        self.check_tiles(grid)
        if grid[0] == 1:
            return
        layout = self.layout(grid)
        if grid[0] != 1 + layout.num_tiles:
            raise ValueError(f"an image of its size has {layout.num_tiles} tiles and an overview")
        if not (layout.height > 0 < layout.width):
            raise ValueError("an image of its size has no vectors")

    def num_patches(self, grid: tuple[int, ...]) -> int:
        """Returns the patches of an image whose grid was checked."""
        return prod(grid[:3])

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns the vectors that such an image becomes, with a newline after each row."""
        of_tile = self.side**2
        if grid[0] == 1:
            return of_tile + 1
        layout = self.layout(grid)
        return of_tile + layout.height * (layout.width + 1)

    def layout(self, grid: tuple[int, ...]) -> TileLayout:
        """Returns how the tiles of an image are laid out."""
        return self._layout_of(grid[3], grid[4])

    def _layout_of(self, height: int, width: int) -> TileLayout:
        return TileLayout.of(
            (height, width),
            self.resolutions,
            side=self.side,
            patch_size=self.patch_size,
            max_tiles=self.max_tiles,
        )

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of an image of about as many vectors, and no more."""
        tile = (self.side, self.side)
        grids = [(1, *tile, 1, 1)]
        for height, width in self.resolutions:
            layout = self._layout_of(height, width)
            grids.append((1 + layout.num_tiles, *tile, height, width))
        fitting = [grid for grid in grids if self.num_vectors(grid) <= max_vectors]
        return max(fitting, default=grids[0])


def read_llava_onevision(whole: Fields, text: Fields, fields: Fields) -> LlavaOnevisionVisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    check_feature_layer(whole)
    whole.choice("vision_feature_select_strategy", ("full",), "full")
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    hidden_size, patch_size = fields.count("hidden_size", 1152), fields.count("patch_size", 14)
    tile_size = fields.count("image_size", 384)
    aspect_ratio = whole.values.get("vision_aspect_ratio") or "anyres_max_9"
    kind, _, max_tiles = str(aspect_ratio).rpartition("_")
    if kind != "anyres_max" or not max_tiles.isdecimal() or not int(max_tiles):
        raise whole.error("vision_aspect_ratio", "anyres_max_ and a number of tiles")
    return LlavaOnevisionVisionConfig(
        image_token_id=read_image_token(whole, 151646),
        num_layers=fields.count("num_hidden_layers", 26),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 4304),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16),
        out_size=text.count("hidden_size"),
        patch_size=patch_size,
        merge=1,
        hidden_act=fields.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        side=tile_size // patch_size,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        has_bias=whole.flag("multimodal_projector_bias", default=True),
        resolutions=_read_resolutions(whole, tile_size),
        max_tiles=int(max_tiles),
    )


def _read_resolutions(whole: Fields, tile_size: int) -> tuple[tuple[int, int], ...]:
    """Reads heights and widths of whole tiles; by default up to six tiles each."""
    name = "image_grid_pinpoints"
    if not whole.has(name):
        sizes = range(tile_size, 7 * tile_size, tile_size)
        return tuple((height, width) for height in sizes for width in sizes)
    pairs = whole.values[name]
    if (
        not isinstance(pairs, list)
        or not pairs
        or not all(_is_tiled(each, tile_size) for each in pairs)
    ):
        raise whole.error(name, f"a list of heights and widths, multiples of {tile_size}")
    return tuple((height, width) for height, width in pairs)


def _is_tiled(pair: object, tile_size: int) -> bool:
    """Whether a JSON value is a height and a width of whole tiles."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(type(each) is int and each > 0 and each % tile_size == 0 for each in pair)
