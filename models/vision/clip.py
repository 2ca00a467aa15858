"""CLIP's encoder, in LLaVA 1.5 and LLaVA-NeXT: SigLIP's layers with a token before the patches.

Source: Radford et al. 2021, "CLIP", section 2.4; transformers 5.24, models/clip.
"""

import torch
from torch import nn

from models.config_sections.llava_towers import LlavaNextVisionConfig, LlavaVisionConfig
from models.layers.vision_tower import TowerLayers
from models.layers.weight import empty_parameter
from models.vision.attention import uniform_bounds
from models.vision.patch_grid import PatchEmbedding
from models.vision.siglip import SiglipBlock


class ClipEncoder(nn.Module):
    """Maps patches of tiles to hidden states, which have no last norm."""

    def __init__(self, config: LlavaVisionConfig | LlavaNextVisionConfig) -> None:
        super().__init__()
        size, self._num_patches = config.hidden_size, config.side**2
        self.class_embedding = empty_parameter(size)
        self.patches = PatchEmbedding(size, config.patch_size, bias=False)
        self.position_embedding = nn.Embedding(1 + self._num_patches, size)
        self.pre_layrnorm = nn.LayerNorm(size, config.norm_eps)  # the checkpoint's spelling
        self.layers = TowerLayers(
            [SiglipBlock(config) for _ in range(config.num_layers)], hidden_size=size
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [tiles, patches of a tile, hidden]."""
        tiles = self.patches(patches).view(-1, self._num_patches, len(self.class_embedding))
        first = self.class_embedding.expand(len(tiles), 1, -1)
        embedded = torch.cat((first, tiles), dim=1) + self.position_embedding.weight
        hidden: torch.Tensor = self.pre_layrnorm(embedded).flatten(0, 1)
        bounds = uniform_bounds(len(hidden), 1 + self._num_patches, patches.device)
        for number in range(len(self.layers)):
            hidden = self.layers.run(number, hidden, bounds)
        return hidden.view(len(tiles), 1 + self._num_patches, -1)[:, 1:]


def unused_parts(config: LlavaVisionConfig | LlavaNextVisionConfig) -> tuple[str, ...]:
    """Returns beginnings of names of parts that are passed over."""
    layers = [f"vision_tower.layers.{number}." for number in config.unused_layers]
    return ("vision_tower.post_layernorm.", "vision_tower.position_ids", *layers)
