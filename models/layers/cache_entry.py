"""A cache entry of a layer that keeps several, or whose attention reads all keys from the cache."""

import torch
from torch import nn

from models.kv_cache import TokenSpec
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support


class CacheEntry(nn.Module):
    """Names a cache entry of a layer; it computes nothing."""

    def __init__(self, layer_index: int, spec: TokenSpec) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.cache_spec = spec

    def cudagraph_support(
        self, device: torch.device, cache_dtype: torch.dtype
    ) -> AttentionCGSupport:
        """Returns the steps whose graphs may contain the layer."""
        del cache_dtype
        return attention_cudagraph_support(device, caches_new_keys=True)
