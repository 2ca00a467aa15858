"""SigLIP's encoder, in models that see tiles of one size.

Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training"; transformers 5.24,
models/siglip.
"""

from collections.abc import Mapping

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config_sections.hy_v4_tower import HyV4VisionConfig
from models.config_sections.vision import TileVisionConfig
from models.layers.norm import LayerNorm
from models.layers.vision_tower import TowerLayers
from models.vision.attention import SplitAttention, uniform_bounds
from models.vision.feed_forward import FeedForward
from models.vision.patch_grid import PatchEmbedding

SIGLIP_NAMES: Mapping[str, str] = {
    "vision_tower.vision_model.": "vision_tower.",
    ".embeddings.patch_embedding.": ".patches.proj.",
    ".embeddings.": ".",
    ".encoder.layers.": ".layers.",
    ".out_proj.": ".o_proj.",
}
"""Replacements of parts of the checkpoint's tensor names, as in `VisionTower`."""


@support_torch_compile({"hidden": 0, "bounds": 0})
class SiglipBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: TileVisionConfig | HyV4VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer_norm1 = LayerNorm(size, config.norm_eps)
        self.layer_norm2 = LayerNorm(size, config.norm_eps)
        self.self_attn = SplitAttention(size, config.num_heads, bias=True, out_bias=True)
        self.mlp = FeedForward((size, config.intermediate_size, size), config.hidden_act)

    def forward(self, hidden: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        attended = self.self_attn(self.layer_norm1(hidden), bounds)
        hidden, normed = self.layer_norm2.of_sum(attended, hidden)
        output: torch.Tensor = hidden + self.mlp(normed)
        return output


class SiglipEncoder(nn.Module):
    """Maps patches of tiles to hidden states.

    has_last_norm: whether the last layer's output is normalised.
    """

    def __init__(self, config: TileVisionConfig, *, has_last_norm: bool = False) -> None:
        super().__init__()
        self.patches = PatchEmbedding(config.hidden_size, config.patch_size, bias=True)
        self.position_embedding = nn.Embedding(config.side**2, config.hidden_size)
        self.layers = TowerLayers(
            [SiglipBlock(config) for _ in range(config.num_layers)], hidden_size=config.hidden_size
        )
        self.post_layernorm = (
            nn.LayerNorm(config.hidden_size, config.norm_eps) if has_last_norm else nn.Identity()
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [tiles, patches of a tile, hidden]."""
        positions = self.position_embedding.weight
        tiles = self.patches(patches).view(-1, *positions.shape) + positions
        hidden: torch.Tensor = tiles.flatten(0, 1)
        bounds = uniform_bounds(len(hidden), len(positions), patches.device)
        for number in range(len(self.layers)):
            hidden = self.layers.run(number, hidden, bounds)
        output: torch.Tensor = self.post_layernorm(hidden.view(-1, *positions.shape))
        return output
