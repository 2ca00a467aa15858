"""Attention over the paged cache, as a layer."""

import torch
from torch import nn

from models.ops.attention.attention import unified_attention_with_output
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support


class Attention(nn.Module):
    """Attends one layer's queries to the cached keys and values of their sequences.

    Metadata and cache come from the forward context; the layer knows only its index.
    """

    splitting_op = "octavo::unified_attention_with_output"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(
        self,
        layer_index: int,
        *,
        sliding_window: int | None = None,
        scale: float | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        """Makes the layer.

        Args:
            layer_index: of its cache and metadata.
            sliding_window: keys that a query sees, as the operator says; None means all.
            scale: factor of the scores; by default 1 / sqrt(head size).
            soft_cap: of scaled scores; 0 for none.
        """
        super().__init__()
        self.layer_index = layer_index
        self.sliding_window = sliding_window
        self.scale = scale
        self.soft_cap = soft_cap

    def cudagraph_support(
        self, device: torch.device, cache_dtype: torch.dtype
    ) -> AttentionCGSupport:
        """Returns the steps whose graphs may contain this layer."""
        del cache_dtype
        return attention_cudagraph_support(device)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps q [T, Hq, D], k and v [T, Hk, D] to [T, Hq * D]; writes k and v to the cache.

        q: contiguous.
        k, v: None if another layer wrote those of the step to the cache.
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
            self.scale,
            self.soft_cap,
        )
        return output.flatten(-2)
