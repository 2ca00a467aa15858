"""Attention over the paged cache, as a layer."""

import torch
from torch import nn

from models.kv_cache import FP8_CACHE_DTYPE
from models.layers.norm import RMSNorm
from models.ops.attention.attention import unified_attention_with_output
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support


class Attention(nn.Module):
    """Attends one layer's queries to the cached keys and values of their sequences.

    Metadata and cache come from the forward context; the layer knows only its index.
    """

    def __init__(self, layer_index: int, *, sliding_window: int | None = None) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.sliding_window = sliding_window

    def cudagraph_support(
        self, device: torch.device, cache_dtype: torch.dtype
    ) -> AttentionCGSupport:
        """Returns the steps whose graphs may contain this layer."""
        return attention_cudagraph_support(device, caches_new_keys=cache_dtype == FP8_CACHE_DTYPE)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps q [T, Hq, D], k and v [T, Hk, D] to [T, Hq * D]; writes k and v to the cache.

        rotation: cosine and signed sine, each [T, 1, D]; rotates q and k. Without it q is
            contiguous.
        norms: of the heads of q and of k before the rotation; of equal eps.
        sinks: [Hq], a score of each head without a key.
        """
        output = q.new_empty(q.shape)
        cos, signed_sin = rotation or (None, None)
        q_norm, k_norm = norms or (None, None)
        unified_attention_with_output(
            q,
            k,
            v,
            output,
            self.layer_index,
            cos,
            signed_sin,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            self.sliding_window,
            sinks,
        )
        return output.flatten(-2)
