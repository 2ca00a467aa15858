"""Where the rows of a sequence are in a paged cache."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.operands.row_pages import RowPages


class RowTensors(NamedTuple):
    """Tensors of RowPages; in a kernel these are pointers."""

    rows: Any
    tables: Any


class RowForm(NamedTuple):
    """Sizes that a build of a kernel is made for.

    size: elements of a row. block_stride: elements from one block to the next.
    rate, block_tokens, table_tokens: as in RowPages.
    """

    size: int
    block_stride: int
    rate: int
    block_tokens: int
    table_tokens: int


@triton.jit
def row_places(table_ptr, numbers, are_rows, form: tl.constexpr):
    """Returns the place of the first element of rows by number, and their blocks.

    table_ptr: of the request. are_rows: which numbers are some.
    """
    lasts = (tl.maximum(numbers, 0) + 1) * form.rate - 1
    blocks = tl.load(table_ptr + lasts // form.table_tokens, mask=are_rows, other=0).to(tl.int64)
    return blocks * form.block_stride + lasts % form.block_tokens // form.rate * form.size, blocks


def row_tensors(pages: RowPages) -> RowTensors:
    """Returns what kernels read of a cache."""
    return RowTensors(pages.rows, pages.block_tables)


def row_form(pages: RowPages) -> RowForm:
    """Returns the sizes of a cache."""
    return RowForm(
        size=pages.rows.shape[-1],
        block_stride=pages.rows.stride(0),
        rate=pages.rate,
        block_tokens=pages.block_tokens,
        table_tokens=pages.table_tokens,
    )


def is_aligned(rows: torch.Tensor) -> bool:
    """Returns whether kernels read such rows: each begins at a multiple of 16 bytes."""
    return (
        all(each * rows.itemsize % 16 == 0 for each in (rows.shape[-1], rows.stride(0)))
        and rows.data_ptr() % 16 == 0
    )
