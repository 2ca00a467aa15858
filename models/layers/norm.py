"""Normalisation layers."""

import torch
from torch import nn

from models.layers.weight import Replicated, ShardId, empty_parameter
from models.ops.elementwise.layer_norm import add_layer_norm, layer_norm
from models.ops.elementwise.rms_norm import rms_norm


class RMSNorm(Replicated, nn.Module):
    """Divides by the root mean square of the last dimension and scales each feature.

    offset: added to the stored weight. The sum is kept in float32, as bfloat16 would round small
        weights away.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self._offset = offset
        self.weight = empty_parameter(size, dtype=torch.float32 if offset else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the whole tensor, plus the offset."""
        values = loaded.float() + self._offset if self._offset else loaded
        super().weight_loader(param, values, shard_id)


class LayerNorm(nn.LayerNorm):
    """Normalises rows, [T, size], with a weight and a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns residual + x, and that normalised."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class UnitNorm(nn.Module):
    """Divides by the root mean square of the last dimension; it has no weights."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.register_buffer("weight", torch.ones(size), persistent=False)
        self.weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, of its shape and dtype."""
        return rms_norm(x, self.weight, self._eps)
