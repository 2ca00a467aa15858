"""MoonViT, the encoder of Kimi K2.5 to 2.7: patches with learned positions, rotated in pairs.

Squares of patches become one vector. The time of videos is left out.
Source: Kimi Team 2025, "Kimi-VL Technical Report"; transformers 5.24, models/kimi_k25.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.config_sections.kimi_tower import KimiVisionConfig
from models.layers.norm import LayerNorm
from models.layers.vision_tower import TowerLayers, VisionTower
from models.vision.feed_forward import FeedForward
from models.vision.patch_grid import PatchEmbedding, bicubic
from models.vision.patch_layout import IMAGE_ROWS, image_layout
from models.vision.qwen_vl import QwenBlock

NORM_EPS = 1e-5


def pair_rotation(coordinates: torch.Tensor, *, head_dim: int, theta: float) -> torch.Tensor:
    """Returns the rotation of pairs of elements, in turns by a patch's column and by its row.

    Args:
        coordinates: [2, N], each patch's row and column.
        head_dim: elements of a head.
        theta: of the frequencies, one for two pairs.

    Returns:
        [N, 2, head_dim] float32, cosines and sines.
    """
    exponents = torch.arange(0, head_dim, 4, device=coordinates.device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    angles = coordinates.flip(0).t().unsqueeze(1) * frequencies.unsqueeze(1)  # [N, D / 4, 2]
    angles = angles.flatten(1).repeat_interleave(2, dim=1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


class KimiEncoder(nn.Module):
    """Maps patches to hidden states."""

    def __init__(self, config: KimiVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self._head_dim, self._theta = config.head_dim, config.rope_theta
        self.patch_embed = PatchEmbedding(size, config.patch_size, bias=True)
        self.positions = nn.Parameter(torch.empty(*config.num_positions, size))
        self.blocks = TowerLayers(
            [
                QwenBlock(
                    config,
                    [LayerNorm(size, NORM_EPS) for _ in range(2)],
                    FeedForward((size, config.intermediate_size, size), config.hidden_act),
                    turns_pairs=True,
                )
                for _ in range(config.num_layers)
            ],
            hidden_size=size,
            rotation_size=config.head_dim,
        )
        self.final_layernorm = nn.LayerNorm(size, NORM_EPS)

    def forward(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]; layout: IMAGE_ROWS of the patches."""
        hidden = self.patch_embed(patches) + bicubic(self.positions, layout[:2], layout[2:4])
        rotation = pair_rotation(layout[:2], head_dim=self._head_dim, theta=self._theta)
        bounds = layout[4:6].t().contiguous()
        for number in range(len(self.blocks)):
            hidden = self.blocks.run(number, hidden, rotation, bounds)
        output: torch.Tensor = self.final_layernorm(hidden)
        return output


class KimiProjector(nn.Module):
    """Maps squares of patches to vectors."""

    def __init__(self, config: KimiVisionConfig) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        size = config.hidden_size * config.merge**2
        self.mlp = FeedForward((size, size, config.out_size), "gelu")

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """Maps [n, merge^2, hidden] to [n, out]."""
        output: torch.Tensor = self.mlp(self.pre_norm(squares).flatten(1))
        return output


class KimiTower(VisionTower):
    """A grid is the height and width of an image in patches, which come in squares of merge^2."""

    layout_rows: ClassVar[tuple[str, ...]] = IMAGE_ROWS
    weights_mapping: ClassVar[dict[str, str]] = {
        "vision_tower.encoder.": "vision_tower.",
        "patch_embed.pos_emb.weight": "positions",
        ".norm1.": ".norm2.",
        ".norm0.": ".norm1.",
        ".mlp.fc1.": ".mlp.fc2.",
        ".mlp.fc0.": ".mlp.fc1.",
        ".wqkv.": ".attn.qkv.",
        ".wo.": ".attn.proj.",
        "mm_projector.proj.0.": "mm_projector.mlp.fc1.",
        "mm_projector.proj.2.": "mm_projector.mlp.fc2.",
    }

    def __init__(self, config: KimiVisionConfig) -> None:
        super().__init__(config)
        self.vision_tower = KimiEncoder(config)
        self.mm_projector = KimiProjector(config)

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        return image_layout([(height, width) for height, width in grids], self.config.merge)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches), layout)
        output: torch.Tensor = self.mm_projector(hidden.unflatten(0, (-1, self.config.merge**2)))
        return output
