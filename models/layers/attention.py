"""Attention over the paged cache, as a layer."""

import torch
from torch import nn

import models.ops.attention  # noqa: F401  # registers the operator


class Attention(nn.Module):
    """Attends one layer's queries to the cached keys and values of their sequences.

    Metadata and cache come from the forward context; the layer knows only its own number.
    """

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Maps q [T, Hq, D], k and v [T, Hk, D] to [T, Hq * D]; writes k and v to the cache."""
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        torch.ops.octavo.unified_attention_with_output(q, k, v, output, self.layer_index)
        return output.flatten(-2)
