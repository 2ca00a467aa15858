"""The encoder of InternVL: tiles of one size with a token before their patches.

Source: Chen et al. 2024, "InternVL"; transformers 5.24, models/internvl.
"""

from typing import ClassVar

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config_sections.towers import InternVLVisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import TowerLayers, VisionTower
from models.layers.weight import empty_parameter
from models.vision.attention import SplitAttention, uniform_bounds
from models.vision.feed_forward import FeedForward
from models.vision.patch_grid import PatchEmbedding, merged_squares

QK_NORM_EPS = 1e-6
PROJECTOR_EPS = 1e-5


@support_torch_compile({"hidden": 0, "bounds": 0})
class InternVLBlock(nn.Module):
    """Attention and feed-forward, each after a norm and scaled element by element."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        size, norm = config.hidden_size, RMSNorm if config.has_rms_norm else nn.LayerNorm
        self.layernorm_before = norm(size, config.norm_eps)
        self.layernorm_after = norm(size, config.norm_eps)
        self.attention = SplitAttention(
            size,
            config.num_heads,
            bias=config.has_bias,
            out_bias=True,
            norm_eps=QK_NORM_EPS if config.has_qk_norm else None,
        )
        self.mlp = FeedForward((size, config.intermediate_size, size), config.hidden_act)
        self.lambda_1 = empty_parameter(size)
        self.lambda_2 = empty_parameter(size)

    def forward(self, hidden: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        hidden = hidden + self.lambda_1 * self.attention(self.layernorm_before(hidden), bounds)
        output: torch.Tensor = hidden + self.lambda_2 * self.mlp(self.layernorm_after(hidden))
        return output


class InternVLEncoder(nn.Module):
    """Maps patches of tiles to hidden states."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self._num_patches = config.side**2
        self.patches = PatchEmbedding(size, config.patch_size, bias=True)
        self.cls_token = empty_parameter(1, 1, size)
        self.position_embeddings = empty_parameter(1, 1 + self._num_patches, size)
        self.layer = TowerLayers(
            [InternVLBlock(config) for _ in range(config.num_layers)], hidden_size=size
        )
        has_norm = config.has_last_norm
        self.layernorm = nn.LayerNorm(size, config.norm_eps) if has_norm else nn.Identity()

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]."""
        tiles = self.patches(patches).view(-1, self._num_patches, self.cls_token.shape[-1])
        first = self.cls_token.expand(len(tiles), -1, -1)
        hidden = (torch.cat((first, tiles), dim=1) + self.position_embeddings).flatten(0, 1)
        bounds = uniform_bounds(len(hidden), 1 + self._num_patches, patches.device)
        for number in range(len(self.layer)):
            hidden = self.layer.run(number, hidden, bounds)
        output: torch.Tensor = self.layernorm(hidden).view(len(tiles), 1 + self._num_patches, -1)
        return output[:, 1:].flatten(0, 1)


class InternVLProjector(nn.Module):
    """Maps squares of patches to vectors."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size * config.merge**2
        self.layer_norm = nn.LayerNorm(size, PROJECTOR_EPS)
        self.mlp = FeedForward((size, config.out_size, config.out_size), "gelu")

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """Maps [n, merge^2 * hidden] to [n, out]."""
        output: torch.Tensor = self.mlp(self.layer_norm(squares))
        return output


class InternVLTower(VisionTower):
    """A grid is the number of an image's tiles, and their height and width in patches.

    Tiles come one after the other, and the patches of each row by row.
    """

    weights_mapping: ClassVar[dict[str, str]] = {
        ".embeddings.patch_embeddings.projection.": ".patches.proj.",
        ".embeddings.": ".",
        ".encoder.layer.": ".layer.",
        ".projection_layer.": ".o_proj.",
        "projector.linear_": "projector.mlp.fc",
    }
    unused_parts: tuple[str, ...] = ("vision_tower.mask_token",)

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__(config)
        self._side = config.side
        self.vision_tower = InternVLEncoder(config)
        self.multi_modal_projector = InternVLProjector(config)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches))
        squares = merged_squares(hidden, self._side, self._side, self.config.merge)
        output: torch.Tensor = self.multi_modal_projector(squares.flatten(1))
        return output
