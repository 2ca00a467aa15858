"""Encoders of Qwen's models: patches of two frames, rotated by row and column.

Squares of patches become one vector. In Qwen3-VL the outputs of some layers become further vectors,
which are added after the text's first layers. In Qwen2.5-VL most layers attend within windows.
Source: Qwen Team 2025, "Qwen3-VL Technical Report" and "Qwen2.5-VL Technical Report"; transformers
5.24, models/qwen3_vl, models/qwen2_5_vl and models/qwen2_vl.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from models.compile_support import support_torch_compile
from models.config_sections.towers import (
    Qwen2VLVisionConfig,
    Qwen3VLVisionConfig,
    Qwen25VLVisionConfig,
)
from models.config_sections.vision import QwenVisionConfig, VisionConfig
from models.layers.norm import LayerNorm, RMSNorm
from models.layers.vision_tower import NUM_COLOURS, TowerLayers, VisionTower
from models.vision.attention import FusedAttention, patch_rotation
from models.vision.feed_forward import FeedForward, GatedFeedForward
from models.vision.patch_grid import interpolated
from models.vision.patch_layout import IMAGE_ROWS, image_layout, window_layout

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

    layout_rows: ClassVar[tuple[str, ...]] = IMAGE_ROWS

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__(config)
        self.config: QwenVisionConfig = config

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        return image_layout([(height, width) for height, width in grids], self.config.merge)

    def make_blocks(self, make: Callable[[], "QwenBlock"]) -> TowerLayers:
        """Returns the configured number of blocks."""
        config = self.config
        return TowerLayers(
            [make() for _ in range(config.num_layers)],
            hidden_size=config.hidden_size,
            rotation_size=config.head_dim,
        )

    def rotation(self, layout: torch.Tensor) -> torch.Tensor:
        """Returns the rotation of patches by row and column."""
        config = self.config
        return patch_rotation(layout[:2], head_dim=config.head_dim, theta=config.rope_theta)

    def encoded(
        self, blocks: TowerLayers, hidden: torch.Tensor, layout: torch.Tensor
    ) -> torch.Tensor:
        """Runs blocks in which all patches of an image attend to each other, on [N, hidden]."""
        rotation, bounds = self.rotation(layout), layout[4:6].t().contiguous()
        for number in range(len(blocks)):
            hidden = blocks.run(number, hidden, rotation, bounds)
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


@support_torch_compile({"hidden": 0, "rotation": 0, "bounds": 0})
class QwenBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(
        self,
        config: VisionConfig,
        norms: Sequence[nn.Module],
        mlp: nn.Module,
        *,
        bias: bool = True,
        out_bias: bool = True,
        turns_pairs: bool = False,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        size, num_heads = config.hidden_size, config.num_heads
        self.attn = FusedAttention(
            size, num_heads, bias=bias, out_bias=out_bias, turns_pairs=turns_pairs
        )
        self.mlp = mlp

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        attended = self.attn(self.norm1(hidden), rotation, bounds)
        if isinstance(self.norm2, LayerNorm):
            hidden, normed = self.norm2.of_sum(attended, hidden)
        else:
            hidden = hidden + attended
            normed = self.norm2(hidden)
        output: torch.Tensor = hidden + self.mlp(normed)
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
        self.blocks = self.make_blocks(
            lambda: QwenBlock(
                config,
                [LayerNorm(size, NORM_EPS) for _ in range(2)],
                FeedForward((size, config.intermediate_size, size), config.hidden_act),
            )
        )
        self.merger = Qwen3VLMerger(config, norms_square=False)
        self.deepstack_mergers = nn.ModuleList(
            Qwen3VLMerger(config, norms_square=True) for _ in config.deepstack_layers
        )

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        learned = interpolated(self.pos_embed, layout[:2], layout[2:4])
        hidden = self.patch_embed(self.scaled(patches)) + learned
        rotation, bounds = self.rotation(layout), layout[4:6].t().contiguous()
        levels: list[torch.Tensor] = []
        for number in range(len(self.blocks)):
            hidden = self.blocks.run(number, hidden, rotation, bounds)
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

    layout_rows: ClassVar[tuple[str, ...]] = (
        *IMAGE_ROWS, "window_start", "window_end", "source", "square",
    )  # fmt: skip

    def __init__(self, config: Qwen25VLVisionConfig) -> None:
        super().__init__(config)
        self.config: Qwen25VLVisionConfig = config
        size, inner_size = config.hidden_size, config.intermediate_size
        self.patch_embed = FramesEmbedding(config, bias=False)
        self.blocks = self.make_blocks(
            lambda: QwenBlock(
                config,
                [RMSNorm(size, NORM_EPS) for _ in range(2)],
                GatedFeedForward(size, inner_size, config.hidden_act, bias=True),
            )
        )
        self.merger = Qwen25VLMerger(config, RMSNorm(size, NORM_EPS))

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches ordered by windows; see `VisionTower`."""
        merge, sizes = self.config.merge, [(height, width) for height, width in grids]
        source, windows, squares = window_layout(sizes, merge, self.config.window)
        images = image_layout(sizes, merge)[:, source]
        return np.concatenate([images, windows, [source, squares]])

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        config = self.config
        hidden = self.patch_embed(self.scaled(patches[layout[8]]))
        rotation = self.rotation(layout)
        of_image, of_window = (layout[at : at + 2].t().contiguous() for at in (4, 6))
        for number in range(len(self.blocks)):
            bounds = of_image if number in config.whole_layers else of_window
            hidden = self.blocks.run(number, hidden, rotation, bounds)
        output: torch.Tensor = self.merger(hidden)[layout[9, :: config.patch_unit]]
        return output


class Qwen2VLTower(QwenTower):
    """The encoder of Qwen2-VL."""

    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__(config)
        size, inner_size = config.hidden_size, config.intermediate_size
        self.patch_embed = FramesEmbedding(config, bias=False)
        self.blocks = self.make_blocks(
            lambda: QwenBlock(
                config,
                [LayerNorm(size, NORM_EPS) for _ in range(2)],
                FeedForward((size, inner_size, size), config.hidden_act),
            )
        )
        self.merger = Qwen25VLMerger(config, nn.LayerNorm(size, NORM_EPS))

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.patch_embed(self.scaled(patches))
        hidden = self.encoded(self.blocks, hidden, layout)
        output: torch.Tensor = self.merger(hidden)
        return output
