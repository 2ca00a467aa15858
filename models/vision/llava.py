"""The encoder of LLaVA 1.5: CLIP's, over the middle of the image.

Source: Liu et al. 2023, "Improved Baselines with Visual Instruction Tuning"; transformers 5.24,
models/llava.
"""

from typing import ClassVar

import torch

from models.config_sections.llava_towers import LlavaVisionConfig
from models.layers.vision_tower import VisionTower
from models.vision.clip import ClipEncoder, unused_parts
from models.vision.feed_forward import FeedForward
from models.vision.siglip import SIGLIP_NAMES


class LlavaTower(VisionTower):
    """A grid is 1 tile, and its height and width in patches, which come row by row."""

    weights_mapping: ClassVar[dict[str, str]] = {
        **SIGLIP_NAMES,
        "projector.linear_": "projector.fc",
    }

    def __init__(self, config: LlavaVisionConfig) -> None:
        super().__init__(config)
        self.unused_parts = unused_parts(config)
        self.vision_tower = ClipEncoder(config)
        sizes = (config.hidden_size, config.out_size, config.out_size)
        self.multi_modal_projector = FeedForward(sizes, "gelu", bias=config.has_bias)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches)).flatten(0, 1)
        output: torch.Tensor = self.multi_modal_projector(hidden)
        return output
