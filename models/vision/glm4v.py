"""The encoder of GLM-4V: as Qwen's, with learned positions that are resized to the image.

Source: GLM-V Team 2025, "GLM-4.1V-Thinking"; transformers 5.24, models/glm4v.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from models.config_sections.towers import Glm4vVisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import TowerLayers
from models.vision.feed_forward import GatedFeedForward
from models.vision.patch_grid import bicubic
from models.vision.qwen_vl import FramesEmbedding, QwenBlock, QwenTower


class Positions(nn.Module):
    """Learned positions of a square grid, bicubic between their centres, in float32."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.position_embedding = nn.Embedding(config.num_positions, config.hidden_size)

    def forward(self, coordinates: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Maps rows and columns, and heights and widths of images, [2, N], to [N, hidden]."""
        weight = self.position_embedding.weight
        side = int(len(weight) ** 0.5)
        return bicubic(weight.view(side, side, -1), coordinates, sizes)


class Glm4vMerger(nn.Module):
    """Maps vectors of squares to those of tokens."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        size = config.out_size
        self.proj = nn.Linear(size, size, bias=False)
        self.post_projection_norm = nn.LayerNorm(size)
        self.mlp = GatedFeedForward(size, config.merger_size, config.hidden_act, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Maps [n, out] to [n, out]."""
        normed = self.post_projection_norm(self.proj(vectors))
        output: torch.Tensor = self.mlp(functional.gelu(normed))
        return output


class Glm4vTower(QwenTower):
    """A grid is the height and width of an image in patches, which come in squares of merge^2."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "merger.gate_proj.": "merger.mlp.gate_proj.",
        "merger.up_proj.": "merger.mlp.up_proj.",
        "merger.down_proj.": "merger.mlp.down_proj.",
    }

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__(config)
        size, eps, merge = config.hidden_size, config.norm_eps, config.merge
        inner_size, act = config.intermediate_size, config.hidden_act
        self.patch_embed = FramesEmbedding(config, bias=True)
        self.post_conv_layernorm = RMSNorm(size, eps)
        self.embeddings = Positions(config)
        self.blocks = TowerLayers(
            [
                QwenBlock(
                    config,
                    [RMSNorm(size, eps) for _ in range(2)],
                    GatedFeedForward(size, inner_size, act, bias=False),
                    bias=config.has_bias,
                    out_bias=False,
                )
                for _ in range(config.num_layers)
            ],
            hidden_size=size,
            rotation_size=config.head_dim,
        )
        self.post_layernorm = RMSNorm(size, eps)
        self.downsample = nn.Conv2d(size, config.out_size, merge, merge)
        self.merger = Glm4vMerger(config)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.post_conv_layernorm(self.patch_embed(self.scaled(patches)))
        hidden = hidden + self.embeddings(layout[:2], layout[2:4])
        hidden = self.encoded(self.blocks, hidden, layout)
        squares = self.post_layernorm(hidden).unflatten(0, (-1, self.config.merge**2))
        # A convolution whose windows do not overlap.
        weight, bias = self.downsample.weight.flatten(1), self.downsample.bias
        merged = functional.linear(squares.transpose(1, 2).flatten(1), weight, bias)
        output: torch.Tensor = self.merger(merged)
        return output
