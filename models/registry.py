"""Maps architecture names of config.json to model classes."""

from collections.abc import Callable, Mapping
from typing import Any

from models.apertus import ApertusForCausalLM
from models.cohere2 import Cohere2ForCausalLM
from models.config import ConfigError, ModelConfig
from models.config_sections.gemma_towers import (
    Gemma3VisionConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)
from models.config_sections.kimi_tower import KimiVisionConfig
from models.config_sections.llava_towers import (
    LlavaNextVisionConfig,
    LlavaOnevisionVisionConfig,
    LlavaVisionConfig,
)
from models.config_sections.towers import (
    Glm4vVisionConfig,
    InternVLVisionConfig,
    PixtralVisionConfig,
    Qwen2VLVisionConfig,
    Qwen3VLVisionConfig,
    Qwen25VLVisionConfig,
)
from models.config_sections.vision import VisionConfig
from models.deepseek_v2 import DeepseekV2ForCausalLM
from models.deepseek_v4 import DeepseekV4ForCausalLM
from models.exaone4 import Exaone4ForCausalLM
from models.falcon_h1 import FalconH1ForCausalLM
from models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from models.gemma4 import Gemma4ForCausalLM
from models.glm4 import Glm4ForCausalLM
from models.glm4_moe import Glm4MoeForCausalLM
from models.gpt_oss import GptOssForCausalLM
from models.granite import GraniteForCausalLM
from models.granite_moe_hybrid import GraniteMoeHybridForCausalLM
from models.hy_v3 import HYV3ForCausalLM
from models.kimi_linear import BailingHybridForCausalLM, KimiLinearForCausalLM
from models.layers.decoder import CausalLM
from models.layers.vision_tower import VisionTower
from models.lfm2 import Lfm2ForCausalLM
from models.llama import LlamaForCausalLM
from models.llama4 import Llama4ForCausalLM
from models.mamba2 import Mamba2ForCausalLM
from models.mimo_v2 import MiMoV2FlashForCausalLM
from models.minimax import MiniMaxForCausalLM
from models.minimax_m2 import MiniMaxM2ForCausalLM
from models.mixtral import MixtralForCausalLM
from models.nemotron_h import NemotronHForCausalLM
from models.olmo2 import Olmo2ForCausalLM
from models.olmo_hybrid import OlmoHybridForCausalLM
from models.parallel.group import ParallelGroup
from models.phi3 import Phi3ForCausalLM
from models.qwen3 import Qwen3ForCausalLM
from models.qwen3_moe import Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, Qwen3VLMoeForCausalLM
from models.qwen3_next import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM
from models.vision.gemma3 import Gemma3Tower
from models.vision.gemma4 import Gemma4Tower, Gemma4UnifiedTower
from models.vision.glm4v import Glm4vTower
from models.vision.internvl import InternVLTower
from models.vision.kimi import KimiTower
from models.vision.llava import LlavaTower
from models.vision.llava_onevision import LlavaNextTower, LlavaOnevisionTower
from models.vision.pixtral import PixtralTower
from models.vision.qwen_vl import Qwen2VLTower, Qwen3VLTower, Qwen25VLTower

ARCHITECTURES: dict[str, Callable[[ModelConfig, ParallelGroup], CausalLM]] = {
    "ApertusForCausalLM": ApertusForCausalLM,
    "BailingHybridForCausalLM": BailingHybridForCausalLM,
    "Cohere2ForCausalLM": Cohere2ForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV32ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV4ForCausalLM": DeepseekV4ForCausalLM,
    "Ernie4_5ForCausalLM": LlamaForCausalLM,
    "Exaone4ForCausalLM": Exaone4ForCausalLM,
    "FalconH1ForCausalLM": FalconH1ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4UnifiedForCausalLM": Gemma4ForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "Glm4MoeLiteForCausalLM": DeepseekV2ForCausalLM,
    "GlmMoeDsaForCausalLM": DeepseekV2ForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM,
    "HYV3ForCausalLM": HYV3ForCausalLM,
    "InternLM3ForCausalLM": LlamaForCausalLM,
    "KimiLinearForCausalLM": KimiLinearForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Lfm2MoeForCausalLM": Lfm2ForCausalLM,
    "Llama4ForCausalLM": Llama4ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "Mamba2ForCausalLM": Mamba2ForCausalLM,
    "MiMoV2FlashForCausalLM": MiMoV2FlashForCausalLM,
    "MiniMaxForCausalLM": MiniMaxForCausalLM,
    "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
    "Ministral3ForCausalLM": LlamaForCausalLM,
    "Mistral4ForCausalLM": DeepseekV2ForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MistralLarge3ForCausalLM": DeepseekV2ForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "NemotronHForCausalLM": NemotronHForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo2ForCausalLM,
    "OlmoHybridForCausalLM": OlmoHybridForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3VLMoeForCausalLM": Qwen3VLMoeForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
    "SeedOssForCausalLM": LlamaForCausalLM,
    "SmolLM3ForCausalLM": LlamaForCausalLM,
    "SolarOpenForCausalLM": Glm4MoeForCausalLM,
}

_TOWERS: Mapping[type[VisionConfig], Callable[[Any], VisionTower]] = {
    Gemma3VisionConfig: Gemma3Tower,
    Gemma4UnifiedVisionConfig: Gemma4UnifiedTower,
    Gemma4VisionConfig: Gemma4Tower,
    Glm4vVisionConfig: Glm4vTower,
    InternVLVisionConfig: InternVLTower,
    KimiVisionConfig: KimiTower,
    LlavaNextVisionConfig: LlavaNextTower,
    LlavaVisionConfig: LlavaTower,
    LlavaOnevisionVisionConfig: LlavaOnevisionTower,
    PixtralVisionConfig: PixtralTower,
    Qwen2VLVisionConfig: Qwen2VLTower,
    Qwen25VLVisionConfig: Qwen25VLTower,
    Qwen3VLVisionConfig: Qwen3VLTower,
}


class UnsupportedArchitectureError(ConfigError):
    """No model class serves this architecture."""


def model_class(architecture: str) -> Callable[[ModelConfig, ParallelGroup], CausalLM]:
    """Returns the class that builds a model of this architecture from a config and a group.

    Raises:
        UnsupportedArchitectureError: there is none; the message lists the supported ones.
    """
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; the supported ones are {known}"
        ) from None


def make_tower(config: VisionConfig) -> VisionTower:
    """Returns the encoder of images of a configuration."""
    return _TOWERS[type(config)](config)
