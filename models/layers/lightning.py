"""Lightning attention: linear attention whose heads forget at rates of their own."""

from collections.abc import Collection

import torch

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.linear import RowParallelLinear
from models.layers.projection_norm import ProjectionNorm
from models.layers.rotary import Rotation
from models.layers.state_mixer import JoinedColumnLinear, StateMixer
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.ops.recurrence.lightning_attention import lightning_attention
from models.parallel.group import ParallelGroup
from models.state_cache import StateSpec

NORM_EPS = 1e-6
"""Added by the norm of outputs; config.json sets only that of other norms."""


class LightningAttention(StateMixer):
    """Mixes tokens by a state that sums keys times values; ranks share the heads.

    Source: MiniMax 2025, "MiniMax-01", section 2.2.
    """

    splitting_op = "octavo::lightning_attention"
    """The operator at which a model with this layer is cut into pieces."""
    slopes: torch.Tensor

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        num_heads, head_dim = config.num_attention_heads, config.head_dim
        num_local = group.split(num_heads, "attention heads")
        spec = StateSpec(num_heads=num_local, head_rows=head_dim, head_columns=head_dim)
        super().__init__(config.cache_index(layer_index, STATE), spec, group)
        self._shape = (3, num_local, head_dim)
        hidden, size = config.hidden_size, num_heads * head_dim
        self.in_proj = JoinedColumnLinear(
            hidden, [size] * 3, stored=((0, 1, 2),), num_interleaved=num_heads, group=group
        )
        self.output_gate = JoinedColumnLinear(hidden, [size], stored=((0,),), group=group)
        self.norm = ProjectionNorm(num_heads, head_dim, NORM_EPS, group)
        self.o_proj = RowParallelLinear(size, hidden, bias=False, group=group)
        first = group.rank * num_local
        slopes = head_slopes(config, layer_index)[first : first + num_local]
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        del rotation
        qkv = self.in_proj(hidden).view(len(hidden), *self._shape)
        mixed = hidden.new_empty(len(hidden), *self._shape[1:])
        lightning_attention(qkv, self.slopes, mixed, self.layer_index)
        gate = self.output_gate(hidden)
        output: torch.Tensor = self.o_proj(sigmoid_gate(self.norm(mixed).flatten(1), gate))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return ()


def head_slopes(config: ModelConfig, layer_index: int) -> torch.Tensor:
    """Returns how fast each head of a layer forgets, [H] float32; later layers forget slower.

    Source: Press et al. 2022, "Train Short, Test Long", section 3; MiniMax's factor of layers.
    """
    num_heads = config.num_attention_heads
    exponents = torch.arange(1, num_heads + 1, dtype=torch.float32)
    share = layer_index / (config.num_hidden_layers - 1 + 1e-5)
    return 2.0 ** (-8.0 / num_heads * exponents) * (1.0 - share + 1e-5)
