"""Reads the image processor's settings that an engine sends."""

from pydantic import ValidationError

from services.frontend.images.families.family import Family
from services.frontend.images.families.gemma4 import Gemma4
from services.frontend.images.families.internvl import InternVL
from services.frontend.images.families.kimi import Kimi
from services.frontend.images.families.llava import Llava
from services.frontend.images.families.llava_onevision import LlavaNext, LlavaOnevision
from services.frontend.images.families.pixtral import Pixtral
from services.frontend.images.families.qwen_vl import Glm4v, HyV4, MiniMaxM3, QwenVL

FAMILIES: dict[str, type[Family]] = {
    "qwen_vl": QwenVL,
    "glm4v": Glm4v,
    "hy_v4": HyV4,
    "minimax_m3": MiniMaxM3,
    "pixtral": Pixtral,
    "internvl": InternVL,
    "kimi": Kimi,
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOnevision,
    "gemma4": Gemma4,
}
"""`ImageProcessor.kind` -> the settings that it has."""


class ImageSettingsError(ValueError):
    """The engine's image processor cannot be followed; this frontend may be older."""


def parse_settings(kind: str, text: str) -> Family:
    """Returns the settings in a JSON object.

    Raises:
        ImageSettingsError: the kind is unknown, or a field is missing, unknown or out of range.
    """
    if kind not in FAMILIES:
        raise ImageSettingsError(f"unknown kind of image processor {kind[:64]!r}")
    try:
        return FAMILIES[kind].model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ImageSettingsError(f"image processor {kind}: {field}: {first['msg']}") from None
