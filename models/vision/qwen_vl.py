"""Encoders of Qwen's models: patches of two frames, rotated by row and column.

Squares of patches become one vector. In Qwen3-VL the outputs of some layers become further vectors,
which are added after the text's first layers. In Qwen2.5-VL most layers attend within windows.
Source: Qwen Team 2025, "Qwen3-VL Technical Report" and "Qwen2.5-VL Technical Report"; transformers
5.24, models/qwen3_vl, models/qwen2_5_vl and models/qwen2_vl.
"""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from models.config_sections.towers import (
    Qwen2VLVisionConfig,
    Qwen3VLVisionConfig,
    Qwen25VLVisionConfig,
    QwenVisionConfig,
)
from models.layers.norm import RMSNorm
from models.layers.vision_tower import NUM_COLOURS, VisionTower
from models.vision.attention import FusedAttention, PatchRotation, Segments
from models.vision.feed_forward import FeedForward, GatedFeedForward
from models.vision.patch_grid import interpolated, unit_windows, window_order

NORM_EPS = 1e-6


class FramesEmbedding(nn.Module):
    """Projects patches, each repeated as the frames of a short video."""

    def __init__(self, config: QwenVisionConfig, *, bias: bool) -> None:
        super().__init__()
        self._num_frames = config.num_frames
        size = (config.num_frames, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(NUM_COLOURS, config.hidden_size, size, size, bias=bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]."""
        colours = patches.view(len(patches), NUM_COLOURS, 1, -1)
        frames = colours.expand(-1, -1, self._num_frames, -1).flatten(1)
        return functional.linear(frames, self.proj.weight.flatten(1), self.proj.bias)


class QwenTower(VisionTower):
    """A grid is the height and width of an image in patches, which come in squares of merge^2."""

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__(config)
        self.config: QwenVisionConfig = config

    def rotation(self, coordinates: torch.Tensor) -> PatchRotation:
        """Returns the rotation of patches by row and column, [2, N]."""
        config = self.config
        return PatchRotation(coordinates, head_dim=config.head_dim, theta=config.rope_theta)

    def encoded(
        self, blocks: nn.ModuleList, hidden: torch.Tensor, grids: Sequence[tuple[int, ...]]
    ) -> torch.Tensor:
        """Runs blocks in which all patches of an image attend to each other, on [N, hidden]."""
        merge, device = self.config.merge, hidden.device
        coordinates = [window_order(height, width, merge, device) for height, width in grids]
        rotation = self.rotation(torch.cat(coordinates, dim=1))
        segments = Segments([prod(grid) for grid in grids], device)
        for block in blocks:
            hidden = block(hidden, rotation, segments)
        return hidden


class Qwen3VLMerger(nn.Module):
    """Maps squares of patches to vectors.

    norms_square: whether patches are normalised together, not one by one.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, norms_square: bool) -> None:
        super().__init__()
        self._size = config.hidden_size * config.merge**2
        norm_size = self._size if norms_square else config.hidden_size
        self.norm = nn.LayerNorm(norm_size, NORM_EPS)
        self.mlp = FeedForward((self._size, self._size, config.out_size), "gelu")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]."""
        normed = self.norm(hidden.view(-1, *self.norm.normalized_shape)).view(-1, self._size)
        output: torch.Tensor = self.mlp(normed)
        return output


class QwenBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(
        self,
        config: QwenVisionConfig,
        norms: Sequence[nn.Module],
        mlp: nn.Module,
        *,
        bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        size, num_heads = config.hidden_size, config.num_heads
        self.attn = FusedAttention(size, num_heads, bias=bias, out_bias=out_bias)
        self.mlp = mlp

    def forward(
        self, hidden: torch.Tensor, rotation: PatchRotation, segments: Segments
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        hidden = hidden + self.attn(self.norm1(hidden), rotation, segments)
        output: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return output


class Qwen3VLTower(QwenTower):
    """The encoder of Qwen3-VL and Qwen3.5."""

    weights_mapping: ClassVar[dict[str, str]] = {
        ".mlp.linear_fc": ".mlp.fc",
        ".linear_fc": ".mlp.fc",
        "deepstack_merger_list.": "deepstack_mergers.",
    }

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__(config)
        self.config: Qwen3VLVisionConfig = config
        size = config.hidden_size
        self.patch_embed = FramesEmbedding(config, bias=True)
        self.pos_embed = nn.Embedding(config.num_positions, size)
        self.blocks = nn.ModuleList(
            QwenBlock(
                config,
                [nn.LayerNorm(size, NORM_EPS) for _ in range(2)],
                FeedForward((size, config.intermediate_size, size), config.hidden_act),
            )
            for _ in range(config.num_layers)
        )
        self.merger = Qwen3VLMerger(config, norms_square=False)
        self.deepstack_mergers = nn.ModuleList(
            Qwen3VLMerger(config, norms_square=True) for _ in config.deepstack_layers
        )

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images; see `VisionTower`."""
        merge, device = self.config.merge, patches.device
        sizes = [(height, width) for height, width in grids]
        coordinates = [window_order(*size, merge, device) for size in sizes]
        learned = [
            interpolated(self.pos_embed, each, *size)
            for each, size in zip(coordinates, sizes, strict=True)
        ]
        hidden = self.patch_embed(self.scaled(patches)) + torch.cat(learned)
        rotation = self.rotation(torch.cat(coordinates, dim=1))
        segments = Segments([prod(size) for size in sizes], device)
        levels: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, rotation, segments)
            if number in self.config.deepstack_layers:
                levels.append(self.deepstack_mergers[len(levels)](hidden))
        return torch.cat((self.merger(hidden), *levels), dim=-1)


class Qwen25VLMerger(nn.Module):
    """Maps squares of patches, which a norm gets one by one, to vectors."""

    def __init__(self, config: QwenVisionConfig, norm: nn.Module) -> None:
        super().__init__()
        self._size = config.hidden_size * config.merge**2
        self.ln_q = norm
        self.mlp = nn.Sequential(
            nn.Linear(self._size, self._size), nn.GELU(), nn.Linear(self._size, config.out_size)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]."""
        output: torch.Tensor = self.mlp(self.ln_q(hidden).view(-1, self._size))
        return output


class Qwen25VLTower(QwenTower):
    """The encoder of Qwen2.5-VL.

    Squares are ordered by windows while they are encoded, so that each window is one segment.
    """

    def __init__(self, config: Qwen25VLVisionConfig) -> None:
        super().__init__(config)
        self.config: Qwen25VLVisionConfig = config
        size, inner_size = config.hidden_size, config.intermediate_size
        self.patch_embed = FramesEmbedding(config, bias=False)
        self.blocks = nn.ModuleList(
            QwenBlock(
                config,
                [RMSNorm(size, NORM_EPS) for _ in range(2)],
                GatedFeedForward(size, inner_size, config.hidden_act, bias=True),
            )
            for _ in range(config.num_layers)
        )
        self.merger = Qwen25VLMerger(config, RMSNorm(size, NORM_EPS))

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images; see `VisionTower`."""
        config, device = self.config, patches.device
        square = config.merge**2
        coordinates = torch.cat(
            [window_order(height, width, config.merge, device) for height, width in grids], dim=1
        )
        units = [(height // config.merge, width // config.merge) for height, width in grids]
        order, windows = unit_windows(units, config.window, device)
        by_window = (order.unsqueeze(1) * square + torch.arange(square, device=device)).flatten()
        hidden = self.patch_embed(self.scaled(patches[by_window]))
        rotation = self.rotation(coordinates[:, by_window])
        of_window = Segments([square * length for length in windows], device)
        of_image = Segments([prod(grid) for grid in grids], device)
        for number, block in enumerate(self.blocks):
            is_whole = number in config.whole_layers
            hidden = block(hidden, rotation, of_image if is_whole else of_window)
        output: torch.Tensor = self.merger(hidden)[order.argsort()]
        return output


class Qwen2VLTower(QwenTower):
    """The encoder of Qwen2-VL."""

    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__(config)
        size, inner_size = config.hidden_size, config.intermediate_size
        self.patch_embed = FramesEmbedding(config, bias=False)
        self.blocks = nn.ModuleList(
            QwenBlock(
                config,
                [nn.LayerNorm(size, NORM_EPS) for _ in range(2)],
                FeedForward((size, inner_size, size), config.hidden_act),
            )
            for _ in range(config.num_layers)
        )
        self.merger = Qwen25VLMerger(config, nn.LayerNorm(size, NORM_EPS))

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images; see `VisionTower`."""
        hidden = self.patch_embed(self.scaled(patches))
        hidden = self.encoded(self.blocks, hidden, grids)
        output: torch.Tensor = self.merger(hidden)
        return output
