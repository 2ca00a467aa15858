"""Copies whole blocks of a cache to rows and back: the parts of all layers in one launch."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch

_WORDS = 1024
"""Elements that a program copies. A launch for each part took 72 of them for Qwen3-8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Where the P parts of each block are.

    addresses: [P] int64, of each part's memory on the device, whose blocks follow one another.
    sizes: [P] int64, elements that a block has in each part.
    starts: [P] int64, where these are in a row.
    largest: the most elements of a part.
    """

    addresses: torch.Tensor
    sizes: torch.Tensor
    starts: torch.Tensor
    largest: int

    @classmethod
    def of(cls, parts: list[torch.Tensor]) -> "BlockParts":
        """Returns them for parts of one dtype, [blocks, size] each, contiguous."""
        device, sizes = parts[0].device, [part.shape[1] for part in parts]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        addresses, all_sizes, all_starts = (
            torch.tensor(each, dtype=torch.int64, device=device)
            for each in ([part.data_ptr() for part in parts], sizes, starts)
        )
        return cls(addresses=addresses, sizes=all_sizes, starts=all_starts, largest=max(sizes))


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=["block_ids_ptr", "rows_ptr", "row_stride", "writes"])
def _block_parts_kernel(
    addresses_ptr, sizes_ptr, starts_ptr, block_ids_ptr, rows_ptr, row_stride, writes,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Copies some elements of one part of one block to its row, or with `writes` from there."""
    part, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    size = tl.load(sizes_ptr + part)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    address = tl.load(addresses_ptr + part).to(tl.pointer_type(rows_ptr.dtype.element_ty))
    at_block = address + tl.load(block_ids_ptr + row) * size + words
    at_row = rows_ptr + row * row_stride + tl.load(starts_ptr + part) + words
    if writes != 0:
        tl.store(at_block, tl.load(at_row, mask=words < size), mask=words < size)
    else:
        tl.store(at_row, tl.load(at_block, mask=words < size), mask=words < size)


def copy_block_parts(
    parts: BlockParts, block_ids: torch.Tensor, rows: torch.Tensor, *, writes: bool
) -> None:
    """Copies blocks to rows, or with `writes` rows to blocks.

    block_ids: [n] int64, contiguous. rows: [n, words], contiguous, of the dtype of the parts.
    """
    grid = (triton.cdiv(parts.largest, _WORDS), len(parts.sizes), len(block_ids))
    launch = _launcher(rows.dtype, rows.device)
    launch(
        grid, parts.addresses, parts.sizes, parts.starts, block_ids, rows, rows.stride(0),
        int(writes),
    )  # fmt: skip


@lru_cache
def _launcher(dtype: torch.dtype, device: torch.device) -> Launch:
    del dtype, device
    return Launch(_block_parts_kernel, WORDS=_WORDS, num_warps=4)
