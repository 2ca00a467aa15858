"""Feed-forward layers of encoders of images."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from models.ops.products.gelu_linear import gelu_linear


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": functional.silu,
}
"""Name in config.json -> activation."""


class FeedForward(nn.Module):
    """fc2(activation(fc1(x))), of sizes that may differ."""

    def __init__(self, sizes: tuple[int, int, int], activation: str, *, bias: bool = True) -> None:
        """Takes the sizes of input, inner layer and output."""
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        self._is_fused = bias and activation == "gelu_pytorch_tanh"
        size, inner_size, out_size = sizes
        self.fc1 = nn.Linear(size, inner_size, bias=bias)
        self.fc2 = nn.Linear(inner_size, out_size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, size] to [N, out]."""
        if self._is_fused:
            inner = gelu_linear(hidden, self.fc1.weight, self.fc1.bias)
        else:
            inner = self._activation(self.fc1(hidden))
        output: torch.Tensor = self.fc2(inner)
        return output


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, size: int, inner_size: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(size, inner_size, bias=bias)
        self.up_proj = nn.Linear(size, inner_size, bias=bias)
        self.down_proj = nn.Linear(inner_size, size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [N, size] to [N, size]."""
        inner = self._activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: torch.Tensor = self.down_proj(inner)
        return output
