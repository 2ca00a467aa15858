"""The encoders of LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision in config.json."""

from dataclasses import dataclass
from math import prod
from typing import Any

from models.config_sections.fields import MAX_COUNT, Fields
from models.config_sections.tile_layout import TileLayout
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    OneTileVisionConfig,
    TileVisionConfig,
    TowerDefaults,
    check_feature_layer,
    check_sides,
    read_colours,
    read_shape,
)

_PINPOINTS = "image_grid_pinpoints"
_NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_CLIP = TowerDefaults(32000, 12, 768, 3072, 12, 32, ("quick_gelu", "gelu"))
_SIGLIP = TowerDefaults(151646, 26, 1152, 4304, 16, 14, ("gelu_pytorch_tanh",))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaVisionConfig(OneTileVisionConfig):
    """Shape of CLIP's tower in LLaVA 1.5, which sees images as one tile.

    num_layers: layers that run. unused_layers: later ones in the checkpoint.
    """

    unused_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextVisionConfig(LlavaOnevisionVisionConfig):
    """Shape of CLIP's tower in LLaVA-NeXT.

    unused_layers: layers of the checkpoint after the last one that runs.
    """

    unused_layers: tuple[int, ...]


def read_llava(whole: Fields, text: Fields, fields: Fields) -> LlavaVisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    return LlavaVisionConfig(**_read_clip(whole, text, fields))


def read_llava_next(whole: Fields, text: Fields, fields: Fields) -> LlavaNextVisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    clip = _read_clip(whole, text, fields)
    tile_size = clip["side"] * clip["patch_size"]
    resolutions = _read_resolutions(whole.with_defaults({_PINPOINTS: _NEXT_PINPOINTS}), tile_size)
    return LlavaNextVisionConfig(**clip, resolutions=resolutions, max_tiles=MAX_COUNT)


def _read_clip(whole: Fields, text: Fields, fields: Fields) -> dict[str, Any]:
    """Returns the fields of both models with CLIP's tower."""
    whole.choice("vision_feature_select_strategy", ("default",), "default")
    whole.choice("projector_hidden_act", ("gelu",), "gelu")
    fields.choice("model_type", ("clip_vision_model",), "clip_vision_model")
    stored, layer = fields.count("num_hidden_layers", 12), whole.values.get("vision_feature_layer")
    layer = -2 if layer is None else layer
    if type(layer) is not int or not -stored <= layer <= stored or not layer:
        raise whole.error("vision_feature_layer", f"one of {stored} layers; -1 is the last")
    num_layers = layer if layer > 0 else stored + 1 + layer
    shape = read_shape(whole, text, fields, _CLIP)
    return {
        **shape,
        "num_layers": num_layers,
        "unused_layers": tuple(range(num_layers, stored)),
        "merge": 1,
        "colours": read_colours(whole, CLIP_MEAN, CLIP_STD),
        "side": fields.count("image_size", 224) // shape["patch_size"],
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
        "has_bias": whole.flag("multimodal_projector_bias", default=True),
    }


def read_llava_onevision(whole: Fields, text: Fields, fields: Fields) -> LlavaOnevisionVisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    check_feature_layer(whole)
    whole.choice("vision_feature_select_strategy", ("full",), "full")
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    shape = read_shape(whole, text, fields, _SIGLIP)
    tile_size = fields.count("image_size", 384)
    aspect_ratio = whole.values.get("vision_aspect_ratio") or "anyres_max_9"
    kind, _, max_tiles = str(aspect_ratio).rpartition("_")
    if kind != "anyres_max" or not max_tiles.isdecimal() or not int(max_tiles):
        raise whole.error("vision_aspect_ratio", "anyres_max_ and a number of tiles")
    return LlavaOnevisionVisionConfig(
        **shape,
        merge=1,
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        side=tile_size // shape["patch_size"],
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        has_bias=whole.flag("multimodal_projector_bias", default=True),
        resolutions=_read_resolutions(whole, tile_size),
        max_tiles=int(max_tiles),
    )


def _read_resolutions(whole: Fields, tile_size: int) -> tuple[tuple[int, int], ...]:
    """Reads heights and widths of whole tiles; by default up to six tiles each."""
    name = _PINPOINTS
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
