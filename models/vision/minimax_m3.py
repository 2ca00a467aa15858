"""The encoder of MiniMax M3: CLIP's layers over patches of two frames, which turn by their place.

Every patch is projected to the size of the text's vectors; then squares of them become one.
Source: transformers 5.24, models/minimax_m3_vl.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.compile_support import support_torch_compile
from models.config_sections.minimax_tower import MiniMaxVisionConfig
from models.layers.norm import LayerNorm
from models.layers.rotary_heads import turned_first
from models.layers.vision_tower import TowerLayers, VisionTower
from models.vision.attention import SplitAttention, space_rotation
from models.vision.feed_forward import FeedForward
from models.vision.patch_layout import IMAGE_ROWS, image_layout
from models.vision.qwen_vl import FramesEmbedding


@support_torch_compile({"hidden": 0, "rotation": 0, "bounds": 0})
class MiniMaxBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: MiniMaxVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        order = turned_first(config.head_dim, config.rotary_dim)
        self.layer_norm1 = LayerNorm(size, config.norm_eps)
        self.layer_norm2 = LayerNorm(size, config.norm_eps)
        self.self_attn = SplitAttention(
            size, config.num_heads, bias=True, out_bias=True, order=order
        )
        self.mlp = FeedForward((size, config.intermediate_size, size), config.hidden_act)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        attended = self.self_attn(self.layer_norm1(hidden), bounds, rotation)
        hidden, normed = self.layer_norm2.of_sum(attended, hidden)
        output: torch.Tensor = hidden + self.mlp(normed)
        return output


class MiniMaxEncoder(nn.Module):
    """Maps patches to hidden states, which have no last norm."""

    def __init__(self, config: MiniMaxVisionConfig) -> None:
        super().__init__()
        self._config, size = config, config.hidden_size
        self.embeddings = FramesEmbedding(config, bias=False)
        self.pre_layrnorm = nn.LayerNorm(size, config.norm_eps)  # the checkpoint's spelling
        self.layers = TowerLayers(
            [MiniMaxBlock(config) for _ in range(config.num_layers)],
            hidden_size=size,
            rotation_size=config.head_dim,
        )

    def forward(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]; layout: IMAGE_ROWS of the patches."""
        config = self._config
        rotation = space_rotation(
            layout[:2],
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            theta=config.rope_theta,
        )
        bounds = layout[4:6].t().contiguous()
        hidden: torch.Tensor = self.pre_layrnorm(self.embeddings(patches))
        for number in range(len(self.layers)):
            hidden = self.layers.run(number, hidden, rotation, bounds)
        return hidden


class MiniMaxProjector(nn.Module):
    """Maps squares of patches to vectors: each patch by itself, then all of a square together."""

    def __init__(self, config: MiniMaxVisionConfig) -> None:
        super().__init__()
        inner_size, out_size = config.projector_size, config.out_size
        self._patch_unit = config.patch_unit
        self.mlp = FeedForward((config.hidden_size, inner_size, out_size), "gelu")
        self.merge = FeedForward((out_size * config.patch_unit, inner_size, out_size), "gelu")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N / merge^2, out]."""
        squares = self.mlp(hidden).unflatten(0, (-1, self._patch_unit)).flatten(1)
        output: torch.Tensor = self.merge(squares)
        return output


class MiniMaxTower(VisionTower):
    """A grid is the height and width of an image in patches, which come in squares of merge^2."""

    layout_rows: ClassVar[tuple[str, ...]] = IMAGE_ROWS
    weights_mapping: ClassVar[dict[str, str]] = {
        "vision_tower.vision_model.": "vision_tower.",
        ".embeddings.patch_embedding.": ".embeddings.proj.",
        ".encoder.layers.": ".layers.",
        ".out_proj.": ".o_proj.",
        "projector.linear_": "projector.mlp.fc",
        "projector.merge_linear_": "projector.merge.fc",
        "patch_merge_mlp.linear_": "multi_modal_projector.merge.fc",
    }

    def __init__(self, config: MiniMaxVisionConfig) -> None:
        super().__init__(config)
        self.vision_tower = MiniMaxEncoder(config)
        self.multi_modal_projector = MiniMaxProjector(config)

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        return image_layout([(height, width) for height, width in grids], self.config.merge)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        hidden = self.vision_tower(self.scaled(patches), layout)
        output: torch.Tensor = self.multi_modal_projector(hidden)
        return output
