"""The encoder of Gemma 3: SigLIP's, whose patches become the means of squares.

Source: Gemma Team 2025, "Gemma 3 Technical Report", section 2.1; transformers 5.24, models/gemma3.
"""

from typing import ClassVar

import torch
from torch import nn

from models.config_sections.gemma_towers import Gemma3VisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import VisionTower
from models.layers.weight import empty_parameter
from models.vision.patch_grid import merged_squares
from models.vision.siglip import SIGLIP_NAMES, SiglipEncoder


class Gemma3Projector(nn.Module):
    """Maps means of squares of patches to vectors."""

    def __init__(self, config: Gemma3VisionConfig) -> None:
        super().__init__()
        self.mm_soft_emb_norm = RMSNorm(config.hidden_size, config.norm_eps, offset=1.0)
        self.mm_input_projection_weight = empty_parameter(config.hidden_size, config.out_size)

    def forward(self, means: torch.Tensor) -> torch.Tensor:
        """Maps [n, hidden] to [n, out]."""
        output: torch.Tensor = self.mm_soft_emb_norm(means) @ self.mm_input_projection_weight
        return output


class Gemma3Tower(VisionTower):
    """A grid is 1 tile, and its height and width in patches, which come row by row."""

    weights_mapping: ClassVar[dict[str, str]] = {**SIGLIP_NAMES}
    unused_parts: tuple[str, ...] = ("vision_tower.head.",)

    def __init__(self, config: Gemma3VisionConfig) -> None:
        super().__init__(config)
        self._side = config.side
        self.vision_tower = SiglipEncoder(config, has_last_norm=True)
        self.multi_modal_projector = Gemma3Projector(config)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches))
        squares = merged_squares(hidden.flatten(0, 1), self._side, self._side, self.config.merge)
        output: torch.Tensor = self.multi_modal_projector(squares.mean(1))
        return output
