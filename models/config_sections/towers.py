"""Encoders of images in config.json, family by family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from models.config_sections.fields import Fields
from models.config_sections.tile_layout import TileLayout
from models.config_sections.vision import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    VisionConfig,
    check_sides,
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
class TileVisionConfig(VisionConfig):
    """Shape of a tower that sees tiles of one size.

    side: patches on each side of a tile.
    """

    side: int
    norm_eps: float
    has_bias: bool

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


def _read_pixtral(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    _check_feature_layer(whole)
    hidden_size = fields.count("hidden_size", 1024)
    return PixtralVisionConfig(
        image_token_id=read_image_token(whole, 10),
        num_layers=fields.count("num_hidden_layers", 24),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 4096),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16, multiple=4),
        out_size=text.count("hidden_size"),
        patch_size=fields.count("patch_size", 14),
        merge=whole.count("spatial_merge_size", 2),
        hidden_act=fields.choice("hidden_act", ("gelu", "silu"), "gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        rope_theta=_read_theta(fields),
        norm_eps=text.number("rms_norm_eps"),
        has_bias=whole.flag("multimodal_projector_bias"),
    )


def _read_internvl(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    _check_feature_layer(whole)
    whole.choice("vision_feature_select_strategy", ("default",), "default")
    if not fields.flag("use_absolute_position_embeddings", default=True):
        raise fields.error("use_absolute_position_embeddings", "true")
    hidden_size, patch_size = (
        fields.count("hidden_size", 1024),
        _read_side(fields, "patch_size", 14),
    )
    merge = int(1 / whole.number("downsample_ratio", 0.5))
    side = _read_side(fields, "image_size", 448) // patch_size
    if not merge or side % merge:
        raise whole.error("downsample_ratio", f"one that divides {side} patches")
    return InternVLVisionConfig(
        image_token_id=read_image_token(whole, 151667),
        num_layers=fields.count("num_hidden_layers", 24),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 4096),
        num_heads=read_heads(fields, hidden_size, "num_attention_heads", 16),
        out_size=text.count("hidden_size"),
        patch_size=patch_size,
        merge=merge,
        hidden_act=fields.choice("hidden_act", ("gelu",), "gelu"),
        colours=read_colours(whole, CLIP_MEAN, CLIP_STD),
        side=side,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        has_bias=fields.flag("attention_bias"),
        has_qk_norm=fields.flag("use_qk_norm"),
        has_rms_norm=fields.choice("norm_type", _NORMS, "layer_norm") == "rms_norm",
        has_last_norm=not fields.flag("use_mean_pooling", default=True),
    )


def _read_llava_onevision(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    _check_feature_layer(whole)
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


def _check_feature_layer(whole: Fields) -> None:
    """Raises ConfigError unless the last layer's output is what the projector takes."""
    if whole.values.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise whole.error("vision_feature_layer", "-1")
    whole.choice("projector_hidden_act", ("gelu",), "gelu")


def _read_side(fields: Fields, name: str, default: int) -> int:
    """Reads the side of a square, given once or twice."""
    value = fields.values.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        fields = Fields(fields.file, {name: value[0]}, fields.prefix)
    return fields.count(name, default)


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


_NORMS = ("layer_norm", "rms_norm")

_READERS: Mapping[str, Callable[[Fields, Fields, Fields], VisionConfig]] = {
    "InternVLForConditionalGeneration": _read_internvl,
    "LlavaOnevisionForConditionalGeneration": _read_llava_onevision,
    "Mistral3ForConditionalGeneration": _read_pixtral,
    "Qwen2_5_VLForConditionalGeneration": _read_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _read_qwen3_vl,
}
"""Class of a whole model -> reader of its encoder, from the whole, its text and this part."""
