"""The encoder of Mistral 3 and Ministral 3: Pixtral's, and a projector that merges its patches.

Source: Mistral AI 2024, "Pixtral 12B"; transformers 5.24, models/pixtral and models/mistral3.
"""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import nn

from models.config_sections.towers import PixtralVisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import VisionTower
from models.vision.attention import PatchRotation, Segments, SplitAttention
from models.vision.feed_forward import FeedForward, GatedFeedForward
from models.vision.patch_grid import PatchEmbedding, merged_squares, window_order

NORM_EPS = 1e-5


class PixtralBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention_norm = RMSNorm(size, NORM_EPS)
        self.ffn_norm = RMSNorm(size, NORM_EPS)
        self.attention = SplitAttention(size, config.num_heads, bias=False, out_bias=False)
        self.feed_forward = GatedFeedForward(
            size, config.intermediate_size, config.hidden_act, bias=False
        )

    def forward(
        self, hidden: torch.Tensor, rotation: PatchRotation, segments: Segments
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), segments, rotation)
        output: torch.Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return output


class PixtralEncoder(nn.Module):
    """Maps patches to hidden states."""

    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__()
        self._head_dim, self._theta = config.head_dim, config.rope_theta
        self.patches = PatchEmbedding(config.hidden_size, config.patch_size, bias=False)
        self.ln_pre = RMSNorm(config.hidden_size, NORM_EPS)
        self.layers = nn.ModuleList(PixtralBlock(config) for _ in range(config.num_layers))

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]."""
        device = patches.device
        coordinates = torch.cat([window_order(*_size(grid), 1, device) for grid in grids], dim=1)
        rotation = PatchRotation(
            coordinates, head_dim=self._head_dim, theta=self._theta, alternates=True
        )
        segments = Segments([prod(grid) for grid in grids], device)
        hidden: torch.Tensor = self.ln_pre(self.patches(patches))
        for layer in self.layers:
            hidden = layer(hidden, rotation, segments)
        return hidden


class PixtralProjector(nn.Module):
    """Maps squares of patches to vectors.

    The elements of a square are ordered by those of a patch, then by its patches.
    """

    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__()
        size, self._merge = config.hidden_size, config.merge
        self.norm = RMSNorm(size, config.norm_eps)
        self.merging_layer = nn.Linear(size * config.merge**2, size, bias=False)
        sizes = (size, config.out_size, config.out_size)
        self.mlp = FeedForward(sizes, "gelu", bias=config.has_bias)

    def forward(self, hidden: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]."""
        images = self.norm(hidden).split([prod(grid) for grid in grids])
        squares = [
            merged_squares(image, *_size(grid), self._merge).transpose(1, 2).flatten(1)
            for image, grid in zip(images, grids, strict=True)
        ]
        output: torch.Tensor = self.mlp(self.merging_layer(torch.cat(squares)))
        return output


def _size(grid: tuple[int, ...]) -> tuple[int, int]:
    height, width = grid
    return height, width


class PixtralTower(VisionTower):
    """A grid is the height and width of an image in patches, which come row by row."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "vision_tower.patch_conv.": "vision_tower.patches.proj.",
        "vision_tower.transformer.": "vision_tower.",
        "projector.patch_merger.": "projector.",
        "projector.linear_": "projector.mlp.fc",
    }

    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__(config)
        self.vision_tower = PixtralEncoder(config)
        self.multi_modal_projector = PixtralProjector(config)

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches), grids)
        output: torch.Tensor = self.multi_modal_projector(hidden, grids)
        return output
