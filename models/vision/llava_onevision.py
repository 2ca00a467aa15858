"""The encoder of LLaVA-OneVision: SigLIP's, over an overview of the image and its tiles.

Vectors of the tiles are laid out as the image, without the padding that made it fit the tiles, and
rows end with a vector of their own.
Source: Li et al. 2024, "LLaVA-OneVision"; transformers 5.24, models/llava_onevision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from models.config_sections.towers import LlavaOnevisionVisionConfig
from models.layers.vision_tower import VisionTower, check_tiles
from models.layers.weight import empty_parameter
from models.vision.attention import Segments, SplitAttention
from models.vision.feed_forward import FeedForward
from models.vision.patch_grid import PatchEmbedding

LEAST_SHRINKING = 1.1
"""Factor by which images must exceed the most vectors before they are resized."""


class SiglipBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: LlavaOnevisionVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer_norm1 = nn.LayerNorm(size, config.norm_eps)
        self.layer_norm2 = nn.LayerNorm(size, config.norm_eps)
        self.self_attn = SplitAttention(size, config.num_heads, bias=True, out_bias=True)
        self.mlp = FeedForward((size, config.intermediate_size, size), config.hidden_act)

    def forward(self, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), segments)
        output: torch.Tensor = hidden + self.mlp(self.layer_norm2(hidden))
        return output


class SiglipEncoder(nn.Module):
    """Maps patches of tiles to hidden states."""

    def __init__(self, config: LlavaOnevisionVisionConfig) -> None:
        super().__init__()
        self.patches = PatchEmbedding(config.hidden_size, config.patch_size, bias=True)
        self.position_embedding = nn.Embedding(config.side**2, config.hidden_size)
        self.layers = nn.ModuleList(SiglipBlock(config) for _ in range(config.num_layers))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [tiles, patches of a tile, hidden]."""
        positions = self.position_embedding.weight
        tiles = self.patches(patches).view(-1, *positions.shape) + positions
        hidden: torch.Tensor = tiles.flatten(0, 1)
        segments = Segments([len(positions)] * len(tiles), patches.device)
        for layer in self.layers:
            hidden = layer(hidden, segments)
        return hidden.view(-1, *positions.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the vectors of an image's tiles are laid out, in vectors.

    rows, columns: of tiles. top, left: rows above, and columns left of the image, that are padding,
    and so are as many at the other end. height, width: of what remains, perhaps resized.
    """

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int

    @classmethod
    def of(
        cls, config: LlavaOnevisionVisionConfig, image_height: int, image_width: int
    ) -> "Layout":
        """Returns the layout of an image of a size in pixels."""
        tile_size = config.side * config.patch_size
        size = best_resolution(image_height, image_width, config.resolutions)
        rows, columns = (each // tile_size for each in size)
        height, width = rows * config.side, columns * config.side
        top = left = 0
        if image_width / image_height > width / height:
            top = (height - int(round(image_height * (width / image_width), 7))) // 2
        else:
            left = (width - int(round(image_width * (height / image_height), 7))) // 2
        height, width = height - 2 * top, width - 2 * left
        shrinking = sqrt(height * width / (config.max_tiles * config.side**2))
        if shrinking > LEAST_SHRINKING:
            height, width = int(height // shrinking), int(width // shrinking)
        return cls(rows=rows, columns=columns, top=top, left=left, height=height, width=width)


def best_resolution(
    height: int, width: int, resolutions: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the resolution that keeps the most pixels of an image, then the smallest of these."""

    def fit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=fit)


class LlavaOnevisionTower(VisionTower):
    """A grid is the number of tiles, their height and width in patches, and the image's in pixels.

    The overview comes first, then the tiles row by row, and so do the patches of each. An image of
    one tile has the overview alone.
    """

    weights_mapping: ClassVar[dict[str, str]] = {
        "vision_tower.vision_model.": "vision_tower.",
        ".embeddings.patch_embedding.": ".patches.proj.",
        ".embeddings.": ".",
        ".encoder.layers.": ".layers.",
        ".out_proj.": ".o_proj.",
        "projector.linear_": "projector.fc",
    }
    unused_parts: ClassVar[tuple[str, ...]] = ("vision_tower.post_layernorm.", "vision_tower.head.")

    def __init__(self, config: LlavaOnevisionVisionConfig) -> None:
        super().__init__(config)
        self.config: LlavaOnevisionVisionConfig = config
        self.vision_tower = SiglipEncoder(config)
        sizes = (config.hidden_size, config.out_size, config.out_size)
        self.multi_modal_projector = FeedForward(sizes, "gelu", bias=config.has_bias)
        self.image_newline = empty_parameter(config.out_size)

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns how many vectors an image becomes."""
        num_tiles, height, width, *size = grid
        if num_tiles == 1:
            return height * width + 1
        layout = Layout.of(self.config, *size)
        return height * width + layout.height * (layout.width + 1)

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images; see `VisionTower`."""
        check_tiles(grids, self.config.side)
        vectors = self.multi_modal_projector(self.vision_tower(self.scaled(patches)))
        images = vectors.split([grid[0] for grid in grids])
        return torch.cat(
            [self._packed(image, grid) for image, grid in zip(images, grids, strict=True)]
        )

    def _packed(self, tiles: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Maps the vectors of an image's tiles, [tiles, n, out], to those of the image."""
        newline = self.image_newline
        if len(tiles) == 1:
            return torch.cat((tiles[0], newline.unsqueeze(0)))
        layout, side = Layout.of(self.config, *grid[3:]), self.config.side
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
