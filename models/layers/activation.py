"""Activation layers."""

import torch
from torch import nn

from models.ops.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """Multiplies the second half of the features by the SiLU of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., 2 * I] to [..., I]."""
        return silu_and_mul(x)
