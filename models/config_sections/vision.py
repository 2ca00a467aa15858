"""The part of a model that encodes images, in config.json and the processor's file beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.config_sections.fields import Fields

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of image processors; the second has them under `image_processor`."""

TowerKind = Literal["qwen3_vl"]

KINDS: dict[str, TowerKind] = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
}
"""Class of a whole model -> its tower in models.vision."""

_IMAGE_TOKENS = {
    "Qwen3VLForConditionalGeneration": 151655,
}
"""Class of a whole model -> the token of its images, if config.json names none."""

_SECTIONS = {
    "Qwen3VLForConditionalGeneration": (24, 20, 20),
}
"""Class of a whole model -> pairs of a head that turn by time, height and width, likewise."""

_ALTERNATING = ("Qwen3VLForConditionalGeneration",)
"""Classes whose sections take turns, pair by pair."""

_Colour = tuple[float, ...]
_HALF: _Colour = (0.5, 0.5, 0.5)
_NORMALISATION: dict[TowerKind, tuple[_Colour, _Colour]] = {"qwen3_vl": (_HALF, _HALF)}
"""Mean and standard deviation of colours, if no file gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourScale:
    """Scaling of a colour value of 0 to 255: (value * factor - mean) / std.

    mean, std: for red, green and blue.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Shape of an encoder of images.

    kind: which tower of models.vision.
    image_token_id: the token that each vector replaces.
    out_size: elements of a vector, as the text's hidden size.
    patch_size: pixels on each side of a patch.
    merge: patches on each side of the square that becomes one vector.
    num_frames: frames of a patch; images repeat their only one.
    num_positions: learned positions, a square.
    deepstack_layers: layers whose outputs are added after the first layers of the text.
    """

    kind: TowerKind
    image_token_id: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    patch_size: int
    merge: int
    colours: ColourScale
    rope_theta: float = 10_000.0
    num_frames: int = 1
    num_positions: int = 0
    deepstack_layers: tuple[int, ...] = ()

    @property
    def num_levels(self) -> int:
        """Layers of the text after which vectors are added."""
        return len(self.deepstack_layers)

    @property
    def num_features(self) -> int:
        """Elements of a row of vectors: the one that replaces a token, then that of each level."""
        return self.out_size * (1 + self.num_levels)


def read_vision(whole: Fields) -> VisionConfig | None:
    """Reads the encoder of a model of several parts; None without one that is served.

    Raises:
        ConfigError: a field is missing or ill-typed, or its value is not supported.
    """
    wrapper = whole.architecture()
    fields = whole.section("vision_config")
    if wrapper not in KINDS or not fields.values:
        return None
    return _read_qwen3_vl(whole, fields)


def _read_qwen3_vl(whole: Fields, fields: Fields) -> VisionConfig:
    fields.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    num_layers = fields.count("depth", 27)
    deepstack = fields.layer_numbers("deepstack_visual_indexes")
    if list(deepstack) != sorted(set(deepstack)) or max(deepstack, default=0) >= num_layers:
        raise fields.error("deepstack_visual_indexes", f"rising numbers below {num_layers}")
    num_positions = fields.count("num_position_embeddings", 2304)
    if int(num_positions**0.5) ** 2 != num_positions:
        raise fields.error("num_position_embeddings", "a square")
    config = VisionConfig(
        kind="qwen3_vl",
        image_token_id=_image_token(whole),
        num_layers=num_layers,
        hidden_size=fields.count("hidden_size", 1152),
        intermediate_size=fields.count("intermediate_size", 4304),
        num_heads=fields.count("num_heads", 16),
        out_size=fields.count("out_hidden_size", 3584),
        patch_size=fields.count("patch_size", 16),
        merge=fields.count("spatial_merge_size", 2),
        colours=_read_colours(whole, "qwen3_vl"),
        rope_theta=fields.section("rope_parameters").number("rope_theta", 10_000.0),
        num_frames=fields.count("temporal_patch_size", 2),
        num_positions=num_positions,
        deepstack_layers=deepstack,
    )
    _check_heads(fields, config)
    return config


def _check_heads(fields: Fields, config: VisionConfig) -> None:
    """Raises ConfigError unless heads share the hidden size, and turn by height and by width."""
    if config.hidden_size % (4 * config.num_heads):
        raise fields.error("hidden_size", f"a multiple of 4 for each of {config.num_heads} heads")


def _image_token(whole: Fields) -> int:
    """Reads the token of images, by either of its names."""
    wrapper = whole.architecture()
    name = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    return whole.count(name, _IMAGE_TOKENS[wrapper], minimum=0)


def read_axes(whole: Fields, text: Fields, num_pairs: int) -> tuple[int, ...]:
    """Reads by which position each of a head's rotated pairs turns: 0 time, 1 height, 2 width.

    Returns:
        One number for each pair; none if all turn by the position in the sequence.

    Raises:
        ConfigError: the sections do not fit the pairs.
    """
    wrapper = whole.architecture()
    rope = text.section(
        "rope_scaling" if text.section("rope_scaling").values else "rope_parameters"
    )
    if wrapper not in _SECTIONS and not rope.has("mrope_section"):
        return ()
    name = "mrope_section"
    given = rope.token_ids(name) if rope.has(name) else _SECTIONS[wrapper]
    if len(given) != 3:
        raise rope.error(name, "a list of three counts of pairs")
    if wrapper in _ALTERNATING:
        axes = [0] * num_pairs
        for axis in (1, 2):
            for pair in range(axis, min(3 * given[axis], num_pairs), 3):
                axes[pair] = axis
        return tuple(axes)
    if sum(given) != num_pairs:
        raise rope.error(name, f"a list of three counts with the sum {num_pairs}")
    return tuple(axis for axis, count in enumerate(given) for _ in range(count))


def _read_colours(whole: Fields, kind: TowerKind) -> ColourScale:
    """Reads how the image processor scales colours, from the file beside config.json."""
    fields = _processor(whole.file.parent)
    mean, std = _NORMALISATION[kind]
    if fields.flag("do_normalize", default=True):
        mean = fields.numbers("image_mean", 3) if fields.has("image_mean") else mean
        std = fields.numbers("image_std", 3) if fields.has("image_std") else std
    else:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    factor = fields.number("rescale_factor", 1 / 255)
    if not fields.flag("do_rescale", default=True):
        factor = 1.0
    return ColourScale(factor=factor, mean=mean, std=std)


def _processor(folder: Path) -> Fields:
    """Returns the fields of a folder's image processor; none without a file."""
    for name in PROCESSOR_FILES:
        if (folder / name).exists():
            fields = Fields.read(folder / name)
            return fields.section("image_processor") if fields.has("image_processor") else fields
    return Fields(folder / PROCESSOR_FILES[0], {})
