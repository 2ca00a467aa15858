"""The KV cache of one layer: its tensors, and the specification that sizes and allocates them."""

from dataclasses import dataclass

import torch

from models.number_formats import FP8

FP8_CACHE_DTYPE = FP8
"""Dtype of cached keys and values that have scales."""
SMALLEST_HEAD = 1e-30
"""Least magnitude that the scale of a cached head is made from; it keeps scales normal floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheData:
    """One layer's cache: k and v, each [N blocks, B tokens, Hk heads, D].

    Every layer has tensors of its own: a view of one stacked tensor that a custom op mutates is
    written wrongly under Inductor with dynamic shapes. Must start finite (zeros): positions past
    a sequence's end get weight 0, and 0 * NaN is NaN.

    k_scale, v_scale: [N, B, Hk] float32, what each head of k and v, which are 8-bit floats then, is
        multiplied by; None: k and v are the numbers themselves.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, the null block included."""
        return self.k.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all there is, by name, each [N, B, ...]."""
        tensors = {"k": self.k, "v": self.v}
        if self.k_scale is not None and self.v_scale is not None:
            tensors |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheData:
    """One layer's cache with latent attention. What KVCacheData says holds here too.

    latent: [N blocks, B tokens, C + P], of each token the C numbers that keys and values are made
    from, and the P rotated ones that all heads' keys share.
    index_keys: [N, B, D], by which an indexer finds the token; None without one.
    """

    latent: torch.Tensor
    index_keys: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, the null block included."""
        return self.latent.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all there is, by name, each [N, B, ...]."""
        if self.index_keys is None:
            return {"latent": self.latent}
        return {"latent": self.latent, "index_keys": self.index_keys}


CacheData = KVCacheData | LatentCacheData


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a layer caches of every token, on one rank: a key and a value of each kv head."""

    num_heads: int
    """Query heads that read it."""
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns how much memory one token takes in a cache of some dtype."""
        scale_bytes = torch.float32.itemsize if dtype == FP8_CACHE_DTYPE else 0
        return 2 * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale_bytes)

    def allocate(
        self, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> KVCacheData:
        """Returns a zeroed cache, with scales if dtype is FP8_CACHE_DTYPE."""

        def allocate(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            shape = (num_blocks, block_size, self.num_kv_heads, *sizes)
            return torch.zeros(shape, dtype=dtype, device=device)

        k, v = allocate(self.head_dim), allocate(self.head_dim)
        if dtype != FP8_CACHE_DTYPE:
            return KVCacheData(k=k, v=v)
        scales = [allocate(dtype=torch.float32) for _ in range(2)]
        return KVCacheData(k=k, v=v, k_scale=scales[0], v_scale=scales[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheSpec:
    """What a layer with latent attention caches of every token; the same on all ranks."""

    num_heads: int
    """Query heads that read it."""
    latent_dim: int
    rope_dim: int
    index_dim: int = 0
    """Size of the key of an indexer; 0 without one."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns how much memory one token takes in a cache of some dtype."""
        return (self.latent_dim + self.rope_dim + self.index_dim) * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> LatentCacheData:
        """Returns a zeroed cache."""

        def allocate(size: int) -> torch.Tensor:
            return torch.zeros(num_blocks, block_size, size, dtype=dtype, device=device)

        return LatentCacheData(
            latent=allocate(self.latent_dim + self.rope_dim),
            index_keys=allocate(self.index_dim) if self.index_dim else None,
        )


CacheSpec = KVCacheSpec | LatentCacheSpec
