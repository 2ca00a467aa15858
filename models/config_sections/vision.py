"""The part of a model that encodes images: facts that all towers of models.vision have."""

from dataclasses import dataclass
from enum import Enum
from math import isqrt, prod
from pathlib import Path
from typing import Any, NamedTuple

from models.config_sections.fields import Fields

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of image processors."""
_PROCESSOR_PARTS = ("image_processor", "media_proc_cfg")
"""Parts of such a file that may have the settings: the second file's, and Kimi K2.5's."""

MAX_SIDE = 2**16
"""Largest number in a grid."""

Colour = tuple[float, ...]
"""A number each for red, green and blue."""
HALF: Colour = (0.5, 0.5, 0.5)
CLIP_MEAN: Colour = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Colour = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourScale:
    """Scaling of a colour value of 0 to 255: (value * factor - mean) / std."""

    factor: float
    mean: Colour
    std: Colour


class MutualLayers(Enum):
    """Layers in which the tokens of an image attend to each other, earlier and later ones."""

    NONE = "none"
    ALL = "all"
    WINDOWS = "those with a sliding window"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Shape of an encoder of images; each tower has one of its own.

    image_token_id: the token that each vector replaces.
    out_size: elements of a vector, as the text's hidden size.
    patch_size: pixels on each side of a patch.
    merge: patches on each side of the square that becomes one vector.
    hidden_act: activation of feed-forward layers.
    mutual_layers: layers of the text in which an image's tokens also attend to later ones of it.
    """

    image_token_id: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    patch_size: int
    merge: int
    hidden_act: str
    colours: ColourScale
    mutual_layers: MutualLayers = MutualLayers.NONE

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch as it comes: red, green and blue of each pixel."""
        return 3 * self.patch_size**2

    @property
    def patch_unit(self) -> int:
        """Patches that are only encoded together: those of a vector, or of a tile."""
        return self.merge**2

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless a grid is one of an image: its height and width in patches."""
        check_sides(grid, 2)
        if any(side % self.merge for side in grid):
            raise ValueError(f"its sides must be multiples of {self.merge}")

    def num_patches(self, grid: tuple[int, ...]) -> int:
        """Returns the patches of an image whose grid was checked."""
        return prod(grid)

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns the vectors that such an image becomes."""
        return prod(grid) // self.merge**2

    def sides(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """Returns rows and columns of such an image's vectors, where positions have both."""
        height, width = grid
        return height // self.merge, width // self.merge

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of an image of about as many vectors, and no more."""
        side = isqrt(max_vectors) * self.merge
        return side, side

    @property
    def max_whole_tokens(self) -> int:
        """Most tokens of an image that one step computes; 0: chunks of prompts may end inside."""
        return 0

    @property
    def num_levels(self) -> int:
        """Layers of the text after which further vectors are added."""
        return 0

    @property
    def num_features(self) -> int:
        """Elements of a row of vectors: the one that replaces a token, then that of each level."""
        return self.out_size * (1 + self.num_levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """Shape of a tower like Qwen's: patches of several frames, rotated by row and column.

    num_frames: frames of a patch; images repeat their only one.
    """

    rope_theta: float
    num_frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileVisionConfig(VisionConfig):
    """Shape of a tower that sees tiles of one size.

    side: patches on each side of a tile.
    """

    side: int
    norm_eps: float
    has_bias: bool

    @property
    def patch_unit(self) -> int:
        """Patches of a tile."""
        return self.side**2

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless a grid is the number of tiles, and their height and width."""
        check_sides(grid, 3)
        self.check_tiles(grid)

    def check_tiles(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless tiles have the size that the tower sees."""
        if grid[1:3] != (self.side, self.side):
            raise ValueError(f"tiles must have {self.side} x {self.side} patches")

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of an image of about as many vectors, and no more."""
        of_tile = self.side**2 // self.merge**2
        return max(1, max_vectors // of_tile), self.side, self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTileVisionConfig(TileVisionConfig):
    """Shape of a tower that sees an image as one tile."""

    def check_tiles(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless a grid is that of one tile."""
        TileVisionConfig.check_tiles(self, grid)
        if grid[0] != 1:
            raise ValueError("an image has one tile")

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of any image."""
        return 1, self.side, self.side


def check_sides(grid: tuple[int, ...], count: int) -> None:
    """Raises ValueError unless a grid has as many numbers, all of a size that images have."""
    if len(grid) != count or not all(0 < side <= MAX_SIDE for side in grid):
        raise ValueError(f"it must be {count} numbers from 1 to {MAX_SIDE}")


def read_colours(
    whole: Fields, mean: Colour, std: Colour, *, normalizes: bool = True
) -> ColourScale:
    """Reads how the image processor scales colours, from the file beside config.json.

    mean, std, normalizes: if it does not say.
    """
    fields = processor_fields(whole.file.parent)
    if fields.flag("do_normalize", default=normalizes):
        mean = fields.numbers("image_mean", 3) if fields.has("image_mean") else mean
        std = fields.numbers("image_std", 3) if fields.has("image_std") else std
    else:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    factor = fields.number("rescale_factor", 1 / 255)
    if not fields.flag("do_rescale", default=True):
        factor = 1.0
    return ColourScale(factor=factor, mean=mean, std=std)


def processor_fields(folder: Path) -> Fields:
    """Returns the fields of a folder's image processor; none without a file."""
    for name in PROCESSOR_FILES:
        if (folder / name).exists():
            fields = Fields.read(folder / name)
            part = next(filter(fields.has, _PROCESSOR_PARTS), None)
            return fields if part is None else fields.section(part)
    return Fields(folder / PROCESSOR_FILES[0], {})


def read_heads(fields: Fields, hidden_size: int, name: str, default: int, multiple: int = 1) -> int:
    """Reads the number of heads; each has a multiple of some elements.

    Raises:
        ConfigError: they do not share the hidden size.
    """
    num_heads = fields.count(name, default)
    if hidden_size % (multiple * num_heads):
        raise fields.error(name, f"a number of heads that share {hidden_size} in {multiple}s")
    return num_heads


class TowerDefaults(NamedTuple):
    """Values of a tower's fields that its file may leave out.

    num_heads: each head has a multiple of `head_multiple` elements. hidden_acts: the activations
    that are served, the default first.
    """

    image_token_id: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    hidden_acts: tuple[str, ...]
    head_multiple: int = 1


def read_shape(
    whole: Fields,
    text: Fields,
    fields: Fields,
    defaults: TowerDefaults,
    *,
    names: tuple[str, str] = ("num_hidden_layers", "num_attention_heads"),
) -> dict[str, Any]:
    """Reads the fields of `VisionConfig` that towers name alike.

    names: of the numbers of layers and heads.
    """
    hidden_size = fields.count("hidden_size", defaults.hidden_size)
    layers, heads = names
    return {
        "image_token_id": read_image_token(whole, defaults.image_token_id),
        "num_layers": fields.count(layers, defaults.num_layers),
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("intermediate_size", defaults.intermediate_size),
        "num_heads": read_heads(
            fields, hidden_size, heads, defaults.num_heads, defaults.head_multiple
        ),
        "out_size": text.count("hidden_size"),
        "patch_size": fields.count("patch_size", defaults.patch_size),
        "hidden_act": fields.choice("hidden_act", defaults.hidden_acts, defaults.hidden_acts[0]),
    }


def read_image_token(whole: Fields, default: int) -> int:
    """Reads the token of images, by any of its names."""
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id")
    found = next(filter(whole.has, names), names[0])
    return whole.count(found, default, minimum=0)


def check_feature_layer(whole: Fields) -> None:
    """Raises ConfigError unless the last layer's output is what the projector takes."""
    if whole.values.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise whole.error("vision_feature_layer", "-1")
    whole.choice("projector_hidden_act", ("gelu",), "gelu")
