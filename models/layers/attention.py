"""Attention over the paged cache, as a layer."""

import torch
from torch import nn

from models.ops.attention.attention import unified_attention_with_output


class Attention(nn.Module):
    """Attends one layer's queries to the cached keys and values of their sequences.

    Metadata and cache come from the forward context; the layer knows only its index.
    """

    def __init__(self, layer_index: int, *, sliding_window: int | None = None) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.sliding_window = sliding_window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps q [T, Hq, D], k and v [T, Hk, D] to [T, Hq * D]; writes k and v to the cache.

        q: contiguous.
        sinks: [Hq], a score of each head without a key.
        """
        output = q.new_empty(q.shape)
        unified_attention_with_output(
            q,
            k,
            v,
            output,
            self.layer_index,
            None,
            None,
            None,
            None,
            0.0,
            self.sliding_window,
            sinks,
        )
        return output.flatten(-2)
