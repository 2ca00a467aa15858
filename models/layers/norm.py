"""Normalisation layers."""

import torch
from torch import nn

from models.layers.weight import Replicated, empty_parameter
from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.operands.input_norm import InputNorm


class RMSNorm(Replicated, nn.Module):
    """Divides by the root mean square of the last dimension and scales each feature."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to the residual stream, if any; returns the normalised sum and the sum itself."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def as_input_norm(self) -> InputNorm:
        """Returns the norm for an operation to apply to its input."""
        return InputNorm(weight=self.weight, eps=self.eps)
