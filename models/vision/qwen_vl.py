"""The encoder of Qwen3-VL and Qwen3.5: patches of two frames, positions learned and rotated.

Squares of patches become one vector. In Qwen3-VL the outputs of some layers become further vectors,
which are added after the text's first layers.
Source: Qwen Team 2025, "Qwen3-VL Technical Report"; transformers 5.24, models/qwen3_vl.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import nn
from torch.nn import functional

from models.config_sections.vision import VisionConfig
from models.layers.vision_tower import NUM_COLOURS, VisionTower
from models.vision.attention import FusedAttention, PatchRotation, Segments
from models.vision.patch_grid import interpolated, window_order

NORM_EPS = 1e-6


class PatchEmbedding(nn.Module):
    """Projects patches, each repeated as the frames of a short video."""

    def __init__(self, config: VisionConfig, *, bias: bool) -> None:
        super().__init__()
        self._num_frames = config.num_frames
        size = (config.num_frames, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(NUM_COLOURS, config.hidden_size, size, size, bias=bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]."""
        colours = patches.view(len(patches), NUM_COLOURS, 1, -1)
        frames = colours.expand(-1, -1, self._num_frames, -1).flatten(1)
        return functional.linear(frames, self.proj.weight.flatten(1), self.proj.bias)


class PatchMerger(nn.Module):
    """Maps squares of patches to vectors.

    norms_square: whether patches are normalised together, not one by one.
    """

    def __init__(self, config: VisionConfig, *, norms_square: bool) -> None:
        super().__init__()
        self._size = config.hidden_size * config.merge**2
        norm_size = self._size if norms_square else config.hidden_size
        self.norm = nn.LayerNorm(norm_size, NORM_EPS)
        self.linear_fc1 = nn.Linear(self._size, self._size)
        self.linear_fc2 = nn.Linear(self._size, config.out_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]."""
        normed = self.norm(hidden.view(-1, *self.norm.normalized_shape)).view(-1, self._size)
        output: torch.Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(normed)))
        return output


class Qwen3VLBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = nn.LayerNorm(size, NORM_EPS)
        self.norm2 = nn.LayerNorm(size, NORM_EPS)
        self.attn = FusedAttention(size, config.num_heads)
        self.mlp = Qwen3VLMlp(config)

    def forward(
        self, hidden: torch.Tensor, rotation: PatchRotation, segments: Segments
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        hidden = hidden + self.attn(self.norm1(hidden), rotation, segments)
        output: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return output


class Qwen3VLMlp(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        inner = functional.gelu(self.linear_fc1(hidden), approximate="tanh")
        output: torch.Tensor = self.linear_fc2(inner)
        return output


class Qwen3VLTower(VisionTower):
    """The encoder of Qwen3-VL and Qwen3.5.

    A grid is the height and width of an image in patches, which come in squares of merge x merge.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.patch_embed = PatchEmbedding(config, bias=True)
        self.pos_embed = nn.Embedding(config.num_positions, config.hidden_size)
        self.blocks = nn.ModuleList(Qwen3VLBlock(config) for _ in range(config.num_layers))
        self.merger = PatchMerger(config, norms_square=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norms_square=True) for _ in config.deepstack_layers
        )

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns how many vectors an image becomes."""
        return prod(grid) // self.config.merge**2

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images; see `VisionTower`."""
        config, device = self.config, patches.device
        sizes = [(height, width) for height, width in grids]
        coordinates = [window_order(*grid, config.merge, device) for grid in sizes]
        learned = [
            interpolated(self.pos_embed, each, *grid)
            for each, grid in zip(coordinates, sizes, strict=True)
        ]
        hidden = self.patch_embed(self.scaled(patches)) + torch.cat(learned)
        head_dim = config.hidden_size // config.num_heads
        rotation = PatchRotation(
            *torch.cat(coordinates, dim=1), head_dim=head_dim, theta=config.rope_theta
        )
        segments = Segments([prod(grid) for grid in grids], device)
        levels: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, rotation, segments)
            if number in config.deepstack_layers:
                levels.append(self.deepstack_merger_list[len(levels)](hidden))
        return torch.cat((self.merger(hidden), *levels), dim=-1)
