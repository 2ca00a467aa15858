"""Maps architecture names of config.json to model classes."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from models.config import ConfigError
from models.config_sections.families import OWN_ARCHITECTURES
from models.config_sections.gemma_towers import (
    Gemma3VisionConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)
from models.config_sections.hy_v4_tower import HyV4VisionConfig
from models.config_sections.kimi_tower import KimiVisionConfig
from models.config_sections.llava_towers import (
    LlavaNextVisionConfig,
    LlavaOnevisionVisionConfig,
    LlavaVisionConfig,
)
from models.config_sections.minimax_tower import MiniMaxVisionConfig
from models.config_sections.towers import (
    Glm4vVisionConfig,
    InternVLVisionConfig,
    PixtralVisionConfig,
    Qwen2VLVisionConfig,
    Qwen3VLVisionConfig,
    Qwen25VLVisionConfig,
)
from models.config_sections.vision import VisionConfig
from models.layers.decoder import CausalLM
from models.layers.vision_tower import VisionTower
from models.vision.gemma3 import Gemma3Tower
from models.vision.gemma4 import Gemma4Tower, Gemma4UnifiedTower
from models.vision.glm4v import Glm4vTower
from models.vision.hy_v4 import HyV4Tower
from models.vision.internvl import InternVLTower
from models.vision.kimi import KimiTower
from models.vision.llava import LlavaTower
from models.vision.llava_onevision import LlavaNextTower, LlavaOnevisionTower
from models.vision.minimax_m3 import MiniMaxTower
from models.vision.pixtral import PixtralTower
from models.vision.qwen_vl import Qwen2VLTower, Qwen3VLTower, Qwen25VLTower

_TOWERS: Mapping[type[VisionConfig], Callable[[Any], VisionTower]] = {
    Gemma3VisionConfig: Gemma3Tower,
    Gemma4UnifiedVisionConfig: Gemma4UnifiedTower,
    Gemma4VisionConfig: Gemma4Tower,
    Glm4vVisionConfig: Glm4vTower,
    HyV4VisionConfig: HyV4Tower,
    InternVLVisionConfig: InternVLTower,
    KimiVisionConfig: KimiTower,
    LlavaNextVisionConfig: LlavaNextTower,
    LlavaVisionConfig: LlavaTower,
    LlavaOnevisionVisionConfig: LlavaOnevisionTower,
    MiniMaxVisionConfig: MiniMaxTower,
    PixtralVisionConfig: PixtralTower,
    Qwen2VLVisionConfig: Qwen2VLTower,
    Qwen25VLVisionConfig: Qwen25VLTower,
    Qwen3VLVisionConfig: Qwen3VLTower,
}


class UnsupportedArchitectureError(ConfigError):
    """No model class serves this architecture."""


def model_class(architecture: str) -> type[CausalLM]:
    """Imports the class that builds a model of this architecture from a config and a group.

    Raises:
        UnsupportedArchitectureError: there is none; the message lists the supported ones.
    """
    if architecture not in OWN_ARCHITECTURES:
        known = ", ".join(OWN_ARCHITECTURES)
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; the supported ones are {known}"
        )
    module, _, name = OWN_ARCHITECTURES[architecture].rpartition(".")
    found: type[CausalLM] = getattr(import_module(module), name)
    return found


def make_tower(config: VisionConfig) -> VisionTower:
    """Returns the encoder of images of a configuration."""
    return _TOWERS[type(config)](config)
