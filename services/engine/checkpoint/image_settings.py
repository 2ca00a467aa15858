"""Reads how a checkpoint's images become patches and tokens, which frontends need to know."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from models.config import CONFIG_FILE
from models.config_sections.fields import Fields
from models.config_sections.vision import CLIP_MEAN, CLIP_STD, HALF, Colour, read_image_token
from services.engine.checkpoint.image_families import (
    gemma3,
    gemma4,
    gemma4_unified,
    glm4v,
    hy_v4,
    internvl,
    kimi,
    llava,
    llava_next,
    llava_onevision,
    minimax_m3,
    pixtral,
    published_kimi,
    qwen_vl,
)
from services.engine.checkpoint.image_files import (
    IMAGE_PROCESSOR_FILE,
    PROCESSOR_FILE,
    ImageFiles,
    channels,
)

_BILINEAR, _BICUBIC = 2, 3


class ImageSettings(NamedTuple):
    """The fields of GetModelInfo's `ImageProcessor` that a checkpoint has."""

    kind: str
    settings: dict[str, Any]
    image_token_id: int
    template_token_id: int
    text_around: str = ""


@dataclass(frozen=True, slots=True)
class _Family:
    kind: str
    image_processor: str
    """transformers' class, without Fast or Pil at its end."""
    image_token_id: int
    """Unless config.json has another one."""
    read: Callable[[ImageFiles], dict[str, Any]]
    mean: Colour = CLIP_MEAN
    std: Colour = CLIP_STD
    normalizes: bool = True
    """Unless a file says otherwise; so are mean, std and resample."""
    resample: int = _BICUBIC
    template_token: tuple[str, int] | None = None
    """The field of config.json with the token that chat templates write, and its default; None:
    that of vectors."""
    crops: bool = False
    """Whether the middle of an image is cut out."""
    text_around: str = ""
    """Text before and after this token."""


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
    settings = _common(files.image, family) | family.read(files)
    token_id = template_token_id = read_image_token(config, family.image_token_id)
    if family.template_token is not None:
        template_token_id = config.count(*family.template_token, minimum=0)
    return ImageSettings(family.kind, settings, token_id, template_token_id, family.text_around)


def _read_files(folder: Path, config: Fields) -> ImageFiles | None:
    """Returns the files; None if none describes an image processor."""
    processor = Fields(folder / PROCESSOR_FILE, {})
    if processor.file.exists():
        processor = Fields.read(processor.file)
    if processor.has("image_processor"):
        return ImageFiles(folder, config, processor, processor.section("image_processor"))
    if (folder / IMAGE_PROCESSOR_FILE).exists():
        image = Fields.read(folder / IMAGE_PROCESSOR_FILE)
        if image.has("media_proc_cfg"):
            image = published_kimi(image)
        return ImageFiles(folder, config, processor, image)
    return None


def _check_steps(image: Fields, family: _Family) -> None:
    """Refuses another class and steps that frontends do not take."""
    found = str(image.values.get("image_processor_type") or family.image_processor)
    if found.removesuffix("Fast").removesuffix("Pil") != family.image_processor:
        raise image.error("image_processor_type", family.image_processor)
    if not image.flag("do_resize", default=True):
        raise image.error("do_resize", "true")
    if image.flag("do_center_crop", default=family.crops) != family.crops:
        raise image.error("do_center_crop", "true" if family.crops else "false")


def _common(image: Fields, family: _Family) -> dict[str, Any]:
    """Returns the fields of all kinds but the size of patches."""
    normalizes = image.flag("do_normalize", default=family.normalizes)
    rescales = image.flag("do_rescale", default=True)
    return {
        "resample": image.count("resample", family.resample, minimum=0),
        "rescale_factor": image.number("rescale_factor", 1 / 255) if rescales else 1.0,
        "image_mean": channels(image, "image_mean", family.mean) if normalizes else [0.0] * 3,
        "image_std": channels(image, "image_std", family.std) if normalizes else [1.0] * 3,
    }


_PLAIN: tuple[Colour, Colour, bool] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), False
_QWEN = ("qwen_vl", "Qwen2VLImageProcessor")
_FAMILIES = {
    "gemma3": _Family(
        "internvl",
        "Gemma3ImageProcessor",
        262144,
        gemma3,
        mean=HALF,
        std=HALF,
        resample=_BILINEAR,
        template_token=("boi_token_index", 255999),
        text_around="\n\n",
    ),
    "gemma4": _Family("gemma4", "Gemma4ImageProcessor", 258880, gemma4, *_PLAIN),
    "gemma4_unified": _Family(
        "gemma4", "Gemma4UnifiedImageProcessor", 258880, gemma4_unified, *_PLAIN
    ),
    "glm4v": _Family("glm4v", "Glm4vImageProcessor", 151343, glm4v),
    "glm4v_moe": _Family("glm4v", "Glm4vImageProcessor", 151363, glm4v),
    "qwen2_vl": _Family(*_QWEN, 151655, qwen_vl),
    "qwen2_5_vl": _Family(*_QWEN, 151655, qwen_vl),
    "qwen3_vl": _Family(*_QWEN, 151655, qwen_vl),
    "qwen3_vl_moe": _Family(*_QWEN, 151655, qwen_vl),
    "qwen3_5": _Family(*_QWEN, 248056, qwen_vl),
    "qwen3_5_moe": _Family(*_QWEN, 248056, qwen_vl),
    "hy_v4_vl": _Family("hy_v4", "HYV4VLImageProcessor", 120120, hy_v4),
    "minimax_m3_vl": _Family("minimax_m3", "MiniMaxM3VLImageProcessor", 200025, minimax_m3),
    "mistral3": _Family("pixtral", "PixtralImageProcessor", 10, pixtral),
    "internvl": _Family("internvl", "GotOcr2ImageProcessor", 151667, internvl),
    "kimi_k25": _Family("kimi", "Kimi_K25ImageProcessor", 163605, kimi, HALF, HALF),
    "llava": _Family("llava", "CLIPImageProcessor", 32000, llava, crops=True),
    "llava_next": _Family("llava_next", "LlavaNextImageProcessor", 32000, llava_next, crops=True),
    "llava_onevision": _Family(
        "llava_onevision", "LlavaOnevisionImageProcessor", 151646, llava_onevision
    ),
}
"""config.json's `model_type` -> how its images are described."""
