"""The encoders of LLaVA-OneVision and LLaVA-NeXT: over an overview of the image and its tiles.

Vectors of the tiles are laid out as the image, without the padding that made it fit the tiles, and
rows end with a vector of their own.
Source: Li et al. 2024, "LLaVA-OneVision"; transformers 5.24, models/llava_onevision and
models/llava_next.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from models.config_sections.llava_towers import LlavaNextVisionConfig, LlavaOnevisionVisionConfig
from models.layers.vision_tower import VisionTower
from models.layers.weight import empty_parameter
from models.vision.clip import ClipEncoder, unused_parts
from models.vision.feed_forward import FeedForward
from models.vision.siglip import SIGLIP_NAMES, SiglipEncoder


class LlavaOnevisionTower(VisionTower):
    """A grid is the number of tiles, their height and width in patches, and the image's in pixels.

    The overview comes first, then the tiles row by row, and so do the patches of each. An image of
    one tile has the overview alone.
    """

    weights_mapping: ClassVar[dict[str, str]] = {
        **SIGLIP_NAMES,
        "projector.linear_": "projector.fc",
    }
    unused_parts: tuple[str, ...] = ("vision_tower.post_layernorm.", "vision_tower.head.")

    def __init__(self, config: LlavaOnevisionVisionConfig) -> None:
        super().__init__(config)
        self.config: LlavaOnevisionVisionConfig = config
        self.vision_tower = self.make_encoder()
        sizes = (config.hidden_size, config.out_size, config.out_size)
        self.multi_modal_projector = FeedForward(sizes, "gelu", bias=config.has_bias)
        self.image_newline = empty_parameter(config.out_size)

    def make_encoder(self) -> nn.Module:
        """Returns the encoder of tiles, of [N, 3 * P * P] to [tiles, patches of a tile, hidden]."""
        return SiglipEncoder(self.config)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes the patches of tiles; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches)).flatten(0, 1)
        output: torch.Tensor = self.multi_modal_projector(hidden)
        return output

    def arrange(self, vectors: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Lays out the vectors of tiles as the images; see `VisionTower`."""
        of_tile = self.config.side**2
        tiles = vectors[: of_tile * sum(grid[0] for grid in grids)].view(
            -1, of_tile, vectors.shape[-1]
        )
        images = torch.split(tiles, [grid[0] for grid in grids])
        return torch.cat(
            [self._packed(image, grid) for image, grid in zip(images, grids, strict=True)]
        )

    def _packed(self, tiles: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Maps the vectors of an image's tiles, [tiles, n, out], to those of the image."""
        newline = self.image_newline
        if len(tiles) == 1:
            return torch.cat((tiles[0], newline.unsqueeze(0)))
        layout, side = self.config.layout(grid), self.config.side
        rows, columns = layout.rows, layout.columns
        image = tiles[1:].view(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3)
        image = image.reshape(-1, rows * side, columns * side)
        bottom, right = rows * side - layout.top, columns * side - layout.left
        image = image[:, layout.top : bottom, layout.left : right]
        if image.shape[1:] != (layout.height, layout.width):
            size = [layout.height, layout.width]
            image = functional.interpolate(image.unsqueeze(0), size, mode="bilinear")[0]
        ends = newline.view(-1, 1, 1).expand(-1, layout.height, 1)
        lines = torch.cat((image, ends), dim=-1)
        return torch.cat((tiles[0], lines.flatten(1).t()))


class LlavaNextTower(LlavaOnevisionTower):
    """Tiles of LLaVA-NeXT, with CLIP's encoder."""

    def __init__(self, config: LlavaNextVisionConfig) -> None:
        super().__init__(config)
        self.unused_parts = unused_parts(config)

    def make_encoder(self) -> nn.Module:
        """Returns CLIP's encoder."""
        assert isinstance(self.config, LlavaNextVisionConfig), "that of this class"
        return ClipEncoder(self.config)
