"""The memory of a KV cache as whole blocks: all that any layer keeps in a block, in one piece."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from models.kernels.gpu import has_kernels
from models.kv_cache import CacheData

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Elements that blocks are copied in; the widest that fits: each thread moves one."""


class BlockMemory:
    """Reads and writes whole blocks, [n, words], each the parts of all layers one after the other.

    Layers that share memory, such as those of several groups or states, are one part. Scales of
    FP8 keys and values, draft layers and small models' layers are parts like any other.
    """

    def __init__(self, caches: Sequence[CacheData]) -> None:
        """Takes the memory of all layers' caches.

        Args:
            caches: of one pool of blocks.
        """
        num_blocks = caches[0].num_blocks
        parts: dict[int, Tensor] = {}
        for cache in caches:
            for tensor in cache.tensors().values():
                content = tensor.view(torch.uint8).view(num_blocks, -1)
                parts.setdefault(tensor.data_ptr(), content)
        sizes = [part.shape[1] for part in parts.values()]
        self.block_bytes = sum(sizes)
        """Bytes of a block across all layers."""
        self.word = next(
            word
            for word in _WORDS
            if all(number % word.itemsize == 0 for number in (*sizes, *parts))
        )
        """The dtype of its elements."""
        self.num_words = self.block_bytes // self.word.itemsize
        """Elements of a block."""
        self.num_blocks = num_blocks
        """Blocks of the pool, the null block included."""
        self._parts = [part.view(self.word) for part in parts.values()]
        self._copy = _make_copy(self._parts)

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self._parts[0].device

    def read(self, block_ids: Tensor, out: Tensor) -> None:
        """Copies blocks, [n] int64, to rows of `out`, [n, words], on their device."""
        self._copy(block_ids, out, writes=False)

    def write(self, block_ids: Tensor, content: Tensor) -> None:
        """Copies rows of `content`, [n, words], on the blocks' device, into blocks, [n] int64."""
        self._copy(block_ids, content, writes=True)


class _Copy(Protocol):
    """Copies blocks to contiguous rows, or with `writes` rows to blocks."""

    def __call__(self, block_ids: Tensor, rows: Tensor, /, *, writes: bool) -> None: ...


def _make_copy(parts: list[Tensor]) -> _Copy:
    """Returns the copy between rows and blocks that have these parts, [blocks, words] each."""
    if has_kernels(parts[0].device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.elementwise.block_parts import BlockParts, copy_block_parts

        return partial(copy_block_parts, BlockParts.of(parts))
    return partial(_copy_parts, parts)


def _copy_parts(parts: list[Tensor], block_ids: Tensor, rows: Tensor, *, writes: bool) -> None:
    sizes = [part.shape[1] for part in parts]
    for part, columns in zip(parts, torch.split(rows, sizes, dim=1), strict=True):
        if writes:
            part.index_copy_(0, block_ids, columns)
        else:
            columns.copy_(part.index_select(0, block_ids))
