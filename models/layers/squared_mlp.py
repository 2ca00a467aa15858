"""Feed-forward layer without a gate: squared ReLU."""

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.parallel.group import ParallelGroup


class SquaredMLP(nn.Module):
    """Feed-forward layer down(relu(up(x))^2).

    Source: So et al. 2021, "Primer", section 3.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup, *, inner_size: int) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, inner_size, config.mlp_bias
        self.up_proj = MergedColumnParallelLinear(hidden, [inner], bias=bias, group=group)
        self.down_proj = RowParallelLinear(inner, hidden, bias=bias, group=group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        output: torch.Tensor = self.down_proj(self.up_proj(hidden).relu().square())
        return output
