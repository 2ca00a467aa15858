"""The encoders of Gemma 4: a tower whose patches become the means of squares, and one of no layers.

Source: transformers 5.24, models/gemma4 and models/gemma4_unified.
"""

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.compile_support import support_torch_compile
from models.config_sections.gemma_towers import Gemma4UnifiedVisionConfig, Gemma4VisionConfig
from models.layers.norm import RMSNorm
from models.layers.vision_tower import NUM_COLOURS, TowerLayers, VisionTower
from models.layers.weight import empty_parameter
from models.ops.attention.segment_attention import segment_attention
from models.vision.attention import halves_rotation, turn_parts
from models.vision.feed_forward import ACTIVATIONS
from models.vision.patch_layout import IMAGE_ROWS, image_layout


class ClippedLinear(nn.Module):
    """A linear layer whose inputs and outputs are clipped, if the model has clips."""

    def __init__(self, config: Gemma4VisionConfig, in_size: int, out_size: int) -> None:
        super().__init__()
        self._has_clips = config.has_clips
        self.linear = nn.Linear(in_size, out_size, bias=False)
        if config.has_clips:
            for name in ("input_min", "input_max", "output_min", "output_max"):
                self.register_parameter(name, _number())
            self.input_min: nn.Parameter
            self.input_max: nn.Parameter
            self.output_min: nn.Parameter
            self.output_max: nn.Parameter

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, in] to [N, out]."""
        if not self._has_clips:
            output: torch.Tensor = self.linear(hidden)
            return output
        output = self.linear(hidden.clamp(self.input_min, self.input_max))
        return output.clamp(self.output_min, self.output_max)


class Gemma4Attention(nn.Module):
    """Attention with norms of the heads of queries, keys and values, and no scale."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size, self._head_size = config.hidden_size, config.head_dim
        self._norm_eps = config.norm_eps
        inner_size = config.num_heads * config.head_dim
        self.q_proj = ClippedLinear(config, size, inner_size)
        self.k_proj = ClippedLinear(config, size, inner_size)
        self.v_proj = ClippedLinear(config, size, inner_size)
        self.o_proj = ClippedLinear(config, inner_size, size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(hidden).unflatten(1, (-1, self._head_size)) for each in projections)
        q = turn_parts(self.q_norm(q), rotation, num_parts=2)
        k = turn_parts(self.k_norm(k), rotation, num_parts=2)
        v = _normalised(v, self._norm_eps)
        output: torch.Tensor = self.o_proj(segment_attention(q, k, v, bounds, 1.0))
        return output


class Gemma4FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size, inner_size = config.hidden_size, config.intermediate_size
        self._activation = ACTIVATIONS[config.hidden_act]
        self.gate_proj = ClippedLinear(config, size, inner_size)
        self.up_proj = ClippedLinear(config, size, inner_size)
        self.down_proj = ClippedLinear(config, inner_size, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        inner = self._activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: torch.Tensor = self.down_proj(inner)
        return output


@support_torch_compile({"hidden": 0, "rotation": 0, "bounds": 0})
class Gemma4Block(nn.Module):
    """Attention and feed-forward, each between two norms."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.self_attn = Gemma4Attention(config)
        self.mlp = Gemma4FeedForward(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        attended = self.self_attn(self.input_layernorm(hidden), rotation, bounds)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        output: torch.Tensor = hidden + self.post_feedforward_layernorm(fed)
        return output


class Gemma4Encoder(nn.Module):
    """Maps patches to means of squares of hidden states."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.input_proj = nn.Linear(config.patch_bytes, size, bias=False)
        self.position_embedding_table = empty_parameter(2, config.num_positions, size)
        self.layers = TowerLayers(
            [Gemma4Block(config) for _ in range(config.num_layers)],
            hidden_size=size,
            rotation_size=config.head_dim,
        )
        if config.has_scales:
            self.std_bias, self.std_scale = empty_parameter(size), empty_parameter(size)

    def forward(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N / merge^2, hidden]; layout: those of `Gemma4Tower`."""
        config = self.config
        at = layout[:2].flip(0)
        of_column, of_row = self.position_embedding_table
        hidden = self.input_proj(_colours_last(patches)) + of_column[at[0]] + of_row[at[1]]
        rotation = halves_rotation(at, head_dim=config.head_dim, theta=config.rope_theta)
        bounds = layout[4:6].t().contiguous()
        for number in range(len(self.layers)):
            hidden = self.layers.run(number, hidden, rotation, bounds)
        squares = hidden[layout[6]].unflatten(0, (-1, config.merge**2))
        means = squares.float().mean(1).to(hidden.dtype)
        # In float32: the factor exceeds the range of float16.
        output = means.float() * sqrt(config.hidden_size)
        if config.has_scales:
            output = (output - self.std_bias.float()) * self.std_scale.float()
        vectors: torch.Tensor = output.to(hidden.dtype)
        return vectors


class Gemma4Projector(nn.Module):
    """Normalises vectors and projects them to those of tokens."""

    def __init__(self, config: Gemma4VisionConfig | Gemma4UnifiedVisionConfig) -> None:
        super().__init__()
        self._norm_eps = config.norm_eps
        self.embedding_projection = nn.Linear(config.hidden_size, config.out_size, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Maps [n, hidden] to [n, out]."""
        output: torch.Tensor = self.embedding_projection(_normalised(vectors, self._norm_eps))
        return output


class Gemma4Tower(VisionTower):
    """A grid is the height and width of an image in patches, which come row by row."""

    weights_mapping: ClassVar[dict[str, str]] = {
        "vision_tower.patch_embedder.": "vision_tower.",
        "vision_tower.encoder.": "vision_tower.",
    }

    layout_rows: ClassVar[tuple[str, ...]] = (*IMAGE_ROWS, "source")

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__(config)
        self.vision_tower = Gemma4Encoder(config)
        self.embed_vision = Gemma4Projector(config)

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        sizes = [(height, width) for height, width in grids]
        return image_layout(sizes, 1, sides=(self.config.merge,))

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        output: torch.Tensor = self.embed_vision(self.vision_tower(self.scaled(patches), layout))
        return output


class PatchEmbedder(nn.Module):
    """Projects patches and adds learned positions, each between norms."""

    def __init__(self, config: Gemma4UnifiedVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.patch_ln1 = nn.LayerNorm(config.patch_bytes)
        self.patch_dense = nn.Linear(config.patch_bytes, size)
        self.patch_ln2 = nn.LayerNorm(size)
        self.pos_embedding = empty_parameter(config.num_positions, 2, size)
        self.pos_norm = nn.LayerNorm(size)

    def forward(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]; layout: IMAGE_ROWS of the patches."""
        rows, columns = layout[:2]
        hidden = self.patch_ln2(self.patch_dense(self.patch_ln1(_colours_last(patches))))
        positions = self.pos_embedding[columns, 0] + self.pos_embedding[rows, 1]
        output: torch.Tensor = self.pos_norm(hidden + positions)
        return output


class Gemma4UnifiedTower(VisionTower):
    """A grid is the height and width of an image in patches, which come row by row."""

    layout_rows: ClassVar[tuple[str, ...]] = IMAGE_ROWS

    def __init__(self, config: Gemma4UnifiedVisionConfig) -> None:
        super().__init__(config)
        self.vision_embedder = PatchEmbedder(config)
        self.embed_vision = Gemma4Projector(config)

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns the layout of patches; see `VisionTower`."""
        return image_layout([(height, width) for height, width in grids], 1)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches; see `VisionTower`."""
        output: torch.Tensor = self.embed_vision(self.vision_embedder(self.scaled(patches), layout))
        return output


def _number() -> nn.Parameter:
    return nn.Parameter(torch.empty(()), requires_grad=False)


def _colours_last(patches: torch.Tensor) -> torch.Tensor:
    """Maps [N, 3 * P * P], colour by colour, to the same pixel by pixel."""
    return patches.view(len(patches), NUM_COLOURS, -1).transpose(1, 2).flatten(1)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides by the root mean square of the last dimension, in float32."""
    values = x.float()
    return (values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
