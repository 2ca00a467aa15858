"""The encoder of Mistral 3 and Ministral 3: Pixtral's, and a projector that merges its patches.

Source: Mistral AI 2024, "Pixtral 12B"; transformers 5.24, models/pixtral and models/mistral3.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.compile_support import support_torch_compile
from models.config_sections.towers import PixtralVisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import TowerLayers, VisionTower
from models.vision.attention import SplitAttention, patch_rotation
from models.vision.feed_forward import FeedForward, GatedFeedForward
from models.vision.patch_grid import PatchEmbedding
from models.vision.patch_layout import IMAGE_ROWS, image_layout

NORM_EPS = 1e-5


@support_torch_compile({"hidden": 0, "rotation": 0, "bounds": 0})
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
        self, hidden: torch.Tensor, rotation: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), bounds, rotation)
        output: torch.Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return output


class PixtralEncoder(nn.Module):
    """Maps patches to hidden states."""

    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__()
        self._head_dim, self._theta = config.head_dim, config.rope_theta
        self.patches = PatchEmbedding(config.hidden_size, config.patch_size, bias=False)
        self.ln_pre = RMSNorm(config.hidden_size, NORM_EPS)
        self.layers = TowerLayers(
            [PixtralBlock(config) for _ in range(config.num_layers)],
            hidden_size=config.hidden_size,
            rotation_size=config.head_dim,
        )

    def forward(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]; layout: IMAGE_ROWS of the patches."""
        rotation = patch_rotation(
            layout[:2], head_dim=self._head_dim, theta=self._theta, alternates=True
        )
        bounds = layout[4:6].t().contiguous()
        hidden: torch.Tensor = self.ln_pre(self.patches(patches))
        for number in range(len(self.layers)):
            hidden = self.layers.run(number, hidden, rotation, bounds)
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

    def forward(self, hidden: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]; source: [N], the patches square by square."""
        squares = self.norm(hidden)[source].unflatten(0, (-1, self._merge**2))
        output: torch.Tensor = self.mlp(self.merging_layer(squares.transpose(1, 2).flatten(1)))
        return output


class PixtralTower(VisionTower):
    """A grid is the height and width of an image in patches, which come row by row."""

    layout_rows: ClassVar[tuple[str, ...]] = (*IMAGE_ROWS, "source")
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

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        sizes = [(height, width) for height, width in grids]
        return image_layout(sizes, 1, sides=(self.config.merge,))

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches), layout)
        output: torch.Tensor = self.multi_modal_projector(hidden, layout[6])
        return output
