"""Reads how a checkpoint's images become patches and tokens, which frontends need to know.

The fields of each kind are the ones of `services.frontend.images.families`. Absent ones get the
defaults of transformers 5.24's classes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from models.config import CONFIG_FILE
from models.config_sections.fields import ConfigError, Fields
from services.engine.checkpoint.model_files import read_bounded
from services.engine.checkpoint.tokenizer_files import TOKENIZER_FILE_BYTES

PROCESSOR_FILE = "processor_config.json"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
_TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_BICUBIC = 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


class ImageSettings(NamedTuple):
    """The fields of GetModelInfo's `ImageProcessor` that a checkpoint has."""

    kind: str
    settings: dict[str, Any]
    image_token_id: int


@dataclass(frozen=True, slots=True)
class _Files:
    """The files that describe a model's images."""

    folder: Path
    config: Fields
    """config.json."""
    processor: Fields
    """processor_config.json, or no fields."""
    image: Fields
    """The image processor's part of it, or preprocessor_config.json."""

    @property
    def vision(self) -> Fields:
        """The encoder's part of config.json."""
        return self.config.section("vision_config")


@dataclass(frozen=True, slots=True)
class _Family:
    kind: str
    image_processor: str
    """transformers' class, without Fast or Pil at its end."""
    image_token_id: int
    """Unless config.json has another one."""
    read: Callable[[_Files], dict[str, Any]]


def image_settings(folder: Path, config_json: dict[str, Any]) -> ImageSettings | None:
    """Returns the image processor of a checkpoint; None if its model sees none of a known kind.

    Args:
        folder: the checkpoint.
        config_json: the content of its config.json.

    Raises:
        ConfigError: a file is malformed, or asks for a step that is not supported.
        ModelFolderError: the tokenizer cannot be read.
    """
    config = Fields(folder / CONFIG_FILE, config_json)
    family = _FAMILIES.get(str(config_json.get("model_type")))
    if family is None or not config.has("vision_config"):
        return None
    files = _read_files(folder, config)
    if files is None:
        return None
    _check_steps(files.image, family)
    token_id = config.values.get("image_token_id", config.values.get("image_token_index"))
    if token_id is None:
        token_id = family.image_token_id
    if type(token_id) is not int or not 0 <= token_id < 2**32:
        raise config.error("image_token_id", "a token id")
    return ImageSettings(family.kind, _common(files.image) | family.read(files), token_id)


def _read_files(folder: Path, config: Fields) -> _Files | None:
    """Returns the files; None if none describes an image processor."""
    processor = Fields(folder / PROCESSOR_FILE, {})
    if processor.file.exists():
        processor = Fields.read(processor.file)
    if processor.has("image_processor"):
        return _Files(folder, config, processor, processor.section("image_processor"))
    if (folder / IMAGE_PROCESSOR_FILE).exists():
        return _Files(folder, config, processor, Fields.read(folder / IMAGE_PROCESSOR_FILE))
    return None


def _check_steps(image: Fields, family: _Family) -> None:
    """Refuses another class and steps that frontends do not take."""
    found = str(image.values.get("image_processor_type") or family.image_processor)
    if found.removesuffix("Fast").removesuffix("Pil") != family.image_processor:
        raise image.error("image_processor_type", family.image_processor)
    if not image.flag("do_resize", default=True):
        raise image.error("do_resize", "true")
    if image.flag("do_center_crop"):
        raise image.error("do_center_crop", "false")


def _common(image: Fields) -> dict[str, Any]:
    """Returns the fields of all kinds but the size of patches."""
    normalizes = image.flag("do_normalize", default=True)
    rescales = image.flag("do_rescale", default=True)
    return {
        "resample": image.count("resample", _BICUBIC, minimum=0),
        "rescale_factor": image.number("rescale_factor", 1 / 255) if rescales else 1.0,
        "image_mean": _channels(image, "image_mean", _CLIP_MEAN) if normalizes else [0.0] * 3,
        "image_std": _channels(image, "image_std", _CLIP_STD) if normalizes else [1.0] * 3,
    }


def _channels(image: Fields, name: str, default: tuple[float, ...]) -> list[float]:
    """Returns a number for each of three channels."""
    value = image.values.get(name)
    if value is None:
        return list(default)
    if not isinstance(value, list):
        value = [value] * 3
    if len(value) != 3:
        raise image.error(name, "a number or three")
    each = Fields(image.file, {f"{name}[{i}]": number for i, number in enumerate(value)})
    return [each.number(key, or_zero=name == "image_mean") for key in each.values]


def _qwen_vl(files: _Files) -> dict[str, Any]:
    image = files.image
    settings = {
        "patch_size": image.count("patch_size", 14),
        "merge_size": image.count("merge_size", 2),
        "temporal_patch_size": image.count("temporal_patch_size", 2),
        "min_pixels": _area(image, "min_pixels", "shortest_edge", 56 * 56),
        "max_pixels": _area(image, "max_pixels", "longest_edge", 28 * 28 * 1280),
    }
    for name, of_encoder in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        _check_equal(files.vision, of_encoder, settings[name])
    return settings


def _pixtral(files: _Files) -> dict[str, Any]:
    patch_size = files.processor.count("patch_size", 16)
    merge_size = files.processor.count("spatial_merge_size", 1)
    _check_equal(files.vision, "patch_size", patch_size)
    _check_equal(files.config, "spatial_merge_size", merge_size)
    height, width = _size(files.image, 1024, edge="longest_edge")
    spellings = [
        str(files.processor.values.get(name) or default)
        for name, default in (
            ("image_break_token", "[IMG_BREAK]"),
            ("image_end_token", "[IMG_END]"),
        )
    ]
    break_id, end_id = _token_ids(files.folder, spellings)
    return {
        "patch_size": patch_size,
        "merge_size": merge_size,
        "max_height": height,
        "max_width": width,
        "break_token_id": break_id,
        "end_token_id": end_id,
    }


def _internvl(files: _Files) -> dict[str, Any]:
    height, width = _size(files.image, 384)
    patch_size = _square(files.vision, "patch_size", 14)
    tokenizer = Fields(files.folder / _TOKENIZER_CONFIG_FILE, {})
    if tokenizer.file.exists():
        tokenizer = Fields.read(tokenizer.file)
    extra = tokenizer.values.get("extra_special_tokens")
    named = tokenizer.values | (extra if isinstance(extra, dict) else {})
    spellings = [
        str(named.get("start_image_token") or "<img>"),
        str(named.get("end_image_token") or "</img>"),
    ]
    start_id, end_id = _token_ids(files.folder, spellings)
    # The processor always asks for tiles, whatever the file says of `crop_to_patches`.
    settings = {
        "patch_size": patch_size,
        "tile_height": height,
        "tile_width": width,
        "min_tiles": files.image.count("min_patches", 1),
        "max_tiles": files.image.count("max_patches", 12),
        "image_seq_length": files.processor.count("image_seq_length", 256),
        "start_token_id": start_id,
        "end_token_id": end_id,
    }
    ratio = files.config.number("downsample_ratio", 0.5)
    num_vectors = int(height // patch_size * ratio) * int(width // patch_size * ratio)
    if settings["image_seq_length"] != num_vectors:
        raise files.processor.error("image_seq_length", f"{num_vectors}, the vectors of a tile")
    return settings


def _llava_onevision(files: _Files) -> dict[str, Any]:
    height, width = _size(files.image, 384, edge="shortest_edge")
    patch_size = _square(files.vision, "patch_size", 16)
    strategy = files.processor.values.get("vision_feature_select_strategy")
    if strategy == "default":
        raise files.processor.error("vision_feature_select_strategy", '"full"')
    num_vectors = (height // patch_size) * (width // patch_size)
    if files.processor.count("num_image_tokens", num_vectors) != num_vectors:
        raise files.processor.error("num_image_tokens", f"{num_vectors}, the vectors of a tile")
    pinpoints = files.image.values.get("image_grid_pinpoints") or _PINPOINTS
    if not isinstance(pinpoints, list) or not all(
        isinstance(sides, list)
        and len(sides) == 2
        and all(type(side) is int and side > 0 for side in sides)
        and sides[0] % height == sides[1] % width == 0
        for sides in pinpoints
    ):
        raise files.image.error("image_grid_pinpoints", "a list of heights and widths in tiles")
    ratio = files.processor.values.get("vision_aspect_ratio") or "anyres_max_9"
    max_tiles = str(ratio).removeprefix("anyres_max_")
    if not max_tiles.isdecimal():
        raise files.processor.error("vision_aspect_ratio", "anyres_max_ and a number")
    return {
        "patch_size": patch_size,
        "tile_height": height,
        "tile_width": width,
        "image_grid_pinpoints": pinpoints,
        "max_anyres_tiles": int(max_tiles),
    }


def _area(image: Fields, name: str, edge: str, default: int) -> int:
    """Returns pixels of a field or, without it, of an "edge" of `size`, which is an area too."""
    size = image.section("size")
    if image.has(name) or not size.values:
        return int(image.number(name, default))
    return int(size.number(edge))


def _size(image: Fields, default: int, *, edge: str | None = None) -> tuple[int, int]:
    """Returns height and width of `size`: two sides, one for both, or one under the name `edge`."""
    value = image.values.get("size")
    if isinstance(value, int):
        return image.count("size"), image.count("size")
    size = image.section("size")
    if edge is not None and size.has(edge):
        return size.count(edge), size.count(edge)
    if not size.values:
        return default, default
    return size.count("height"), size.count("width")


def _square(fields: Fields, name: str, default: int) -> int:
    """Returns a side that may be given twice."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return fields.count(name, default)
    if not value or len(set(map(str, value))) != 1:
        raise fields.error(name, "the same number for height and width")
    return Fields(fields.file, {name: value[0]}, fields.prefix).count(name)


def _check_equal(fields: Fields, name: str, expected: int) -> None:
    """Checks a field of config.json, if it is there, against the processor's."""
    if fields.has(name) and _square(fields, name, expected) != expected:
        raise fields.error(name, f"{expected}, as in {PROCESSOR_FILE} or {IMAGE_PROCESSOR_FILE}")


def _token_ids(folder: Path, spellings: list[str]) -> list[int]:
    """Returns the ids of added tokens.

    Raises:
        ConfigError: the tokenizer lacks one.
        ModelFolderError: it cannot be read.
    """
    path = folder / _TOKENIZER_FILE
    try:
        tokenizer = json.loads(read_bounded(path, TOKENIZER_FILE_BYTES[_TOKENIZER_FILE]))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    added = tokenizer.get("added_tokens") if isinstance(tokenizer, dict) else None
    ids: dict[str, Any] = {
        token["content"]: token.get("id")
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    for spelling in spellings:
        if type(ids.get(spelling)) is not int:
            raise ConfigError(f"{path} has no added token {spelling!r} for images")
    return [int(ids[spelling]) for spelling in spellings]


_QWEN = ("qwen_vl", "Qwen2VLImageProcessor")
_FAMILIES = {
    "qwen2_5_vl": _Family(*_QWEN, 151655, _qwen_vl),
    "qwen3_vl": _Family(*_QWEN, 151655, _qwen_vl),
    "qwen3_vl_moe": _Family(*_QWEN, 151655, _qwen_vl),
    "qwen3_5": _Family(*_QWEN, 248056, _qwen_vl),
    "qwen3_5_moe": _Family(*_QWEN, 248056, _qwen_vl),
    "mistral3": _Family("pixtral", "PixtralImageProcessor", 10, _pixtral),
    "internvl": _Family("internvl", "GotOcr2ImageProcessor", 151667, _internvl),
    "llava_onevision": _Family(
        "llava_onevision", "LlavaOnevisionImageProcessor", 151646, _llava_onevision
    ),
}
"""config.json's `model_type` -> how its images are described."""
