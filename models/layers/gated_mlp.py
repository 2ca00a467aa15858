"""The dense feed-forward layer with a gate."""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.ops.elementwise.gelu_and_mul import gelu_and_mul
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.parallel.group import ParallelGroup


class GatedMLP(nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x)), or with gelu for silu.

    Without `is_reduced`, each rank gets a part whose sum over the ranks is the output.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: ParallelGroup,
        *,
        intermediate_size: int | None = None,
        is_reduced: bool = True,
    ) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        inner = intermediate_size or config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=bias, group=group
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=bias, group=group, is_reduced=is_reduced
        )
        self._has_silu = config.hidden_act == "silu"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        gate_up = self.gate_up_proj(hidden)
        inner = silu_and_mul(gate_up) if self._has_silu else gelu_and_mul(gate_up)
        output: torch.Tensor = self.down_proj(inner)
        return output

    @property
    def has_packed_gate(self) -> bool:
        """Whether gate and up stay packed, whose product takes no norm."""
        return self.gate_up_proj.method.packing is not None

    @property
    def has_packed_weights(self) -> bool:
        """Whether a weight stays packed."""
        return self.has_packed_gate or self.down_proj.method.packing is not None

    @property
    def fuses_gate(self) -> bool:
        """Whether the product and the gate may be one kernel of 16-bit weights."""
        layer = self.gate_up_proj
        return self._has_silu and layer.bias is None and layer.weight.dtype.itemsize == 2

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return {"linear_gate"} if self._has_silu else ()
