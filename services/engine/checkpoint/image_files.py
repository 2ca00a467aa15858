"""Files of a checkpoint that describe how its images become patches and tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config_sections.fields import ConfigError, Fields
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.tokenizer_files import TokenizerFiles

PROCESSOR_FILE = "processor_config.json"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
_TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class ImageFiles:
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


def pixel_area(image: Fields, name: str, edge: str, default: int) -> int:
    """Returns pixels of a field or, without it, of an "edge" of `size`, which is an area too."""
    size = image.section("size")
    if image.has(name) or not size.values:
        return int(image.number(name, default))
    return int(size.number(edge))


def image_size(image: Fields, default: int, *, edge: str | None = None) -> tuple[int, int]:
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


def square(fields: Fields, name: str, default: int) -> int:
    """Returns a side that may be given twice."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return fields.count(name, default)
    if not value or len(set(map(str, value))) != 1:
        raise fields.error(name, "the same number for height and width")
    return Fields(fields.file, {name: value[0]}, fields.prefix).count(name)


def check_equal(fields: Fields, name: str, expected: int) -> None:
    """Checks a field of config.json, if it is there, against the processor's."""
    if fields.has(name) and square(fields, name, expected) != expected:
        raise fields.error(name, f"{expected}, as in {PROCESSOR_FILE} or {IMAGE_PROCESSOR_FILE}")


def token_ids(folder: Path, spellings: list[str]) -> list[int]:
    """Returns the ids of added tokens.

    Raises:
        ConfigError: the tokenizer lacks one.
        ModelFolderError: it cannot be read.
    """
    path = folder / _TOKENIZER_FILE
    content = TokenizerFiles.from_folder(folder).content(_TOKENIZER_FILE)
    if content is None:
        raise ModelFolderError(f"{path} cannot be read: there is none")
    try:
        tokenizer = json.loads(content)
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


def channels(image: Fields, name: str, default: tuple[float, ...]) -> list[float]:
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
