"""The KV cache of one layer: its tensors, and the specification that sizes and allocates them."""

from dataclasses import dataclass

import torch

from models.number_formats import FP8
from models.state_cache import StateCacheData, StateSpec

FP8_CACHE_DTYPE = FP8
"""Dtype of cached keys and values that have scales."""
ROTATED_CACHE_DTYPE = torch.bfloat16
"""Dtype of what an FP8 cache keeps without scales: the rotated elements of latent entries, and keys
for an index of blocks."""
SMALLEST_HEAD = 1e-30
"""Least magnitude that the scale of a cached head is made from; it keeps scales normal floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheData:
    """One layer's cache: k and v, each [N blocks, B tokens, Hk heads, D].

    Every layer has tensors of its own: Inductor miscompiles a custom op's writes to a view of one
    stacked tensor. Must start finite (zeros): positions past a sequence's end get weight 0, and 0 *
    NaN is NaN.

    k_scale, v_scale: [N, B, Hk] float32, factors of each FP8 head of k and v; else None.
    index_keys: [N, B, I], the tokens' keys for an index of blocks, 16 or more bits; None without.
    block_stride: blocks of the tensors that one of the pool takes, of which it uses the first.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    block_stride: int = 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, the null block included."""
        return self.k.shape[0] // self.block_stride

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, each [N, B, ...]."""
        tensors = {"k": self.k, "v": self.v}
        if self.k_scale is not None and self.v_scale is not None:
            tensors |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
        if self.index_keys is not None:
            tensors["index_keys"] = self.index_keys
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheData:
    """One layer's cache with latent attention; the notes of KVCacheData apply.

    latent: [N blocks, B tokens, C], which keys and values are made from.
    rotated: [N, B, P], the rotated elements that all heads' keys share.
    latent_scale: [N, B] float32, factors of FP8 latent vectors; else None.
    index_keys: [N, B, D], the tokens' keys for an indexer; None without one.
    index_scale: [N, B] float32, factors of FP8 keys for an indexer; else None.
    """

    latent: torch.Tensor
    rotated: torch.Tensor
    latent_scale: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_scale: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
        return self.latent.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, each [N, B, ...]."""
        tensors = {
            "latent": self.latent,
            "rotated": self.rotated,
            "latent_scale": self.latent_scale,
            "index_keys": self.index_keys,
            "index_scale": self.index_scale,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCacheData:
    """One layer's cache of rows, one for every few tokens; the notes of KVCacheData apply.

    rows: [N blocks, n, C]; the elements of a block follow one another, blocks may be apart. A row
        is in the block of its last token, in the order of positions.
    rate: tokens of a row. block_tokens: tokens of a block.
    """

    rows: torch.Tensor
    rate: int
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
        return self.rows.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, each [N, n, ...]."""
        return {"rows": self.rows}


CacheData = KVCacheData | LatentCacheData | RowCacheData | StateCacheData


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """A layer's cache entry per token, on one rank: a key and a value of each kv head."""

    num_heads: int
    """Query heads that read it."""
    num_kv_heads: int
    head_dim: int
    index_dim: int = 0
    """Size of a token's key for an index of blocks, which all heads share; 0 without one."""

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Returns the memory of a block of as many tokens."""
        return block_size * self.bytes_per_token(dtype)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the memory of one token in a cache of `dtype`."""
        scale_bytes = torch.float32.itemsize if dtype == FP8_CACHE_DTYPE else 0
        index_bytes = self.index_dim * _index_dtype(dtype).itemsize
        return 2 * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale_bytes) + index_bytes

    def state_units(self, block_size: int, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the parts of a block that can hold units of a state, and the bytes of each."""
        return 2, block_size * self.num_kv_heads * self.head_dim * dtype.itemsize

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> KVCacheData:
        """Returns a zeroed cache, with scales if dtype is FP8_CACHE_DTYPE.

        memory: zeroed, [2, num_blocks, bytes], which keys and values share with states, or with
            layers that cache as many bytes or several times as many.
        """
        stride = 1
        if memory is not None:
            stride = memory.shape[2] // self.state_units(block_size, dtype)[1]

        def allocate(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            shape = (num_blocks * stride, block_size, self.num_kv_heads, *sizes)
            return torch.zeros(shape, dtype=dtype, device=device)

        if memory is None:
            k, v = allocate(self.head_dim), allocate(self.head_dim)
        else:
            shape = (2, num_blocks * stride, block_size, self.num_kv_heads, self.head_dim)
            k, v = memory.view(dtype).view(shape)
        index_keys = None
        if self.index_dim:
            sizes = (num_blocks * stride, block_size, self.index_dim)
            index_keys = torch.zeros(sizes, dtype=_index_dtype(dtype), device=device)
        if dtype != FP8_CACHE_DTYPE:
            return KVCacheData(k=k, v=v, index_keys=index_keys, block_stride=stride)
        scales = [allocate(dtype=torch.float32) for _ in range(2)]
        return KVCacheData(
            k=k,
            v=v,
            k_scale=scales[0],
            v_scale=scales[1],
            index_keys=index_keys,
            block_stride=stride,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheSpec:
    """A layer's cache entry per token with latent attention; the same on all ranks."""

    num_heads: int
    """Query heads that read it."""
    latent_dim: int
    rope_dim: int
    index_dim: int = 0
    """Size of an indexer's key; 0 without one."""

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Returns the memory of a block of as many tokens."""
        return block_size * self.bytes_per_token(dtype)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the memory of one token in a cache of `dtype`."""
        if dtype != FP8_CACHE_DTYPE:
            return (self.latent_dim + self.rope_dim + self.index_dim) * dtype.itemsize
        num_scales = 2 if self.index_dim else 1
        return (
            (self.latent_dim + self.index_dim) * dtype.itemsize
            + num_scales * torch.float32.itemsize
            + self.rope_dim * ROTATED_CACHE_DTYPE.itemsize
        )

    def state_units(self, block_size: int, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the parts of a block that can hold units of a state, and the bytes of each."""
        return 1, block_size * self.latent_dim * dtype.itemsize

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> LatentCacheData:
        """Returns a zeroed cache, with scales if dtype is FP8_CACHE_DTYPE.

        memory: zeroed, [1, num_blocks, bytes], which latent vectors share with states.
        """

        def allocate(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_blocks, block_size, *sizes, dtype=dtype, device=device)

        is_fp8, has_index = dtype == FP8_CACHE_DTYPE, self.index_dim > 0
        if memory is None:
            latent = allocate(self.latent_dim, dtype=dtype)
        else:
            latent = memory.view(dtype).view(num_blocks, block_size, self.latent_dim)
        return LatentCacheData(
            latent=latent,
            rotated=allocate(self.rope_dim, dtype=ROTATED_CACHE_DTYPE if is_fp8 else dtype),
            latent_scale=allocate(dtype=torch.float32) if is_fp8 else None,
            index_keys=allocate(self.index_dim, dtype=dtype) if has_index else None,
            index_scale=allocate(dtype=torch.float32) if is_fp8 and has_index else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCacheSpec:
    """A layer's cache of one row for every few tokens; the same on all ranks."""

    size: int
    """Elements of a row."""
    rate: int = 1
    """Tokens of a row."""

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Returns the memory of a block of as many tokens: of the most rows that may end in it."""
        return -(-block_size // self.rate) * self.size * dtype.itemsize

    def state_units(self, block_size: int, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the parts of a block that can hold units of a state, and the bytes of each."""
        return 1, self.block_bytes(block_size, dtype)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> RowCacheData:
        """Returns a zeroed cache.

        memory: zeroed, [1, num_blocks, bytes], which layers with rows of other sizes share.

        Raises:
            ValueError: dtype is FP8_CACHE_DTYPE; rows have no scales.
        """
        if dtype == FP8_CACHE_DTYPE:
            raise ValueError("compressed keys are not cached in 8 bits: leave out --kv-cache-dtype")
        num_rows = -(-block_size // self.rate)
        if memory is None:
            rows = torch.zeros(num_blocks, num_rows, self.size, dtype=dtype, device=device)
        else:
            own = memory[0].view(dtype)[:, : num_rows * self.size]
            rows = own.view(num_blocks, num_rows, self.size)
        return RowCacheData(rows=rows, rate=self.rate, block_tokens=block_size)


def _index_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of keys for an index of blocks, which have no scales."""
    return ROTATED_CACHE_DTYPE if dtype == FP8_CACHE_DTYPE else dtype


TokenSpec = KVCacheSpec | LatentCacheSpec | RowCacheSpec
CacheSpec = TokenSpec | StateSpec
