"""The encoder of Hy4: SigLIP's layers over patches with learned positions; rows of vectors end.

Source: transformers 5.24, models/hy_v4_vl.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from models.config_sections.hy_v4_tower import HyV4VisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import TowerLayers, VisionTower
from models.layers.weight import empty_parameter
from models.vision.patch_grid import PatchEmbedding, bilinear
from models.vision.patch_layout import IMAGE_ROWS, image_layout
from models.vision.siglip import SiglipBlock

SIZE_SHIFT = 0.1
"""Added to the size that learned positions are resized to.

So they move a little where they have that size, as PyTorch moves them on a GPU; on a CPU it copies.
"""


class HyV4Encoder(nn.Module):
    """Maps patches to hidden states, which have no last norm."""

    def __init__(self, config: HyV4VisionConfig) -> None:
        super().__init__()
        size, self._side = config.hidden_size, config.side
        self.patches = PatchEmbedding(size, config.patch_size, bias=True)
        self.position_embedding = nn.Embedding(1 + config.side**2, size)
        self.layers = TowerLayers(
            [SiglipBlock(config) for _ in range(config.num_layers)], hidden_size=size
        )

    def forward(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]; layout: IMAGE_ROWS of the patches."""
        source = (layout[:2] + 0.5) * self._side / (layout[2:4] + SIZE_SHIFT) - 0.5
        positions = self.position_embedding.weight[1:]  # the first is that of a whole image
        hidden: torch.Tensor = self.patches(patches) + bilinear(positions, source.clamp(min=0))
        bounds = layout[4:6].t().contiguous()
        for number in range(len(self.layers)):
            hidden = self.layers.run(number, hidden, bounds)
        return hidden


class HyV4Merger(nn.Module):
    """Maps squares of patches to vectors; its weights are stored as those of convolutions."""

    def __init__(self, config: HyV4VisionConfig) -> None:
        super().__init__()
        size, merge = config.hidden_size, config.merge
        self._patch_unit = config.patch_unit
        self.before_rms = RMSNorm(size, config.norm_eps)
        self.proj_conv = nn.Conv2d(size, size * merge**2, merge, merge)
        self.proj_out = nn.Conv2d(size * merge**2, config.out_size, 1)
        self.image_newline = empty_parameter(config.out_size)

    def forward(self, hidden: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]; source: [N], the patches square by square."""
        squares = self.before_rms(hidden)[source].unflatten(0, (-1, self._patch_unit))
        # Convolutions whose windows do not overlap.
        inner, outer = self.proj_conv, self.proj_out
        merged = functional.linear(
            squares.transpose(1, 2).flatten(1), inner.weight.flatten(1), inner.bias
        )
        return functional.linear(functional.gelu(merged), outer.weight.flatten(1), outer.bias)


class HyV4Tower(VisionTower):
    """A grid is the height and width of an image in patches, which come row by row."""

    layout_rows: ClassVar[tuple[str, ...]] = (*IMAGE_ROWS, "source")
    weights_mapping: ClassVar[dict[str, str]] = {
        "vit.": "vision_tower.",
        ".perceive.": ".patch_merger.",
        "vision_tower.patch_merger.": "patch_merger.",
        "patch_merger.norm.": "patch_merger.before_rms.",
        "patch_merger.proj.0.": "patch_merger.proj_conv.",
        "patch_merger.proj.2.": "patch_merger.proj_out.",
        ".embeddings.patch_embedding.": ".patches.proj.",
        ".embeddings.": ".",
        ".input_layernorm.": ".layer_norm1.",
        ".post_attention_layernorm.": ".layer_norm2.",
        ".dense_h_to_4h.": ".fc1.",
        ".dense_4h_to_h.": ".fc2.",
    }

    def __init__(self, config: HyV4VisionConfig) -> None:
        super().__init__(config)
        self.config: HyV4VisionConfig = config
        self.vision_tower = HyV4Encoder(config)
        self.patch_merger = HyV4Merger(config)

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        sizes = [(height, width) for height, width in grids]
        return image_layout(sizes, 1, sides=(self.config.merge,))

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches, without the ends of rows; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches), layout)
        output: torch.Tensor = self.patch_merger(hidden, layout[6])
        return output

    def arrange(self, vectors: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Ends rows of vectors; see `VisionTower`."""
        images, first = [], 0
        for grid in grids:
            rows, columns = self.config.sides(grid)
            count = rows * (columns - 1)
            image = vectors[first : first + count].view(rows, columns - 1, -1)
            ends = self.patch_merger.image_newline.expand(rows, 1, -1)
            images.append(torch.cat((image, ends), dim=1).flatten(0, 1))
            first += count
        return torch.cat(images) if images else vectors[:0]
