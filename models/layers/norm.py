"""Normalisation layers."""

import torch
from torch import nn

from models.layers.weight import Replicated, empty_parameter
from models.ops.elementwise.rms_norm import rms_norm


class RMSNorm(Replicated, nn.Module):
    """Divides by the root mean square of the last dimension and scales each feature."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
