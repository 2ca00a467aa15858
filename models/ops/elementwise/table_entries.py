"""Scattered writes to a table of integers, such as block ids."""

import torch

from models.kernels.gpu import has_kernels


def write_entries(table: torch.Tensor, writes: torch.Tensor) -> None:
    """Overwrites n entries of a table [rows, columns] int32, contiguous.

    writes: [2, n] int32, contiguous: indices into the flattened table, each once, and values.
    """
    if has_kernels(table.device):
        from models.kernels.elementwise import table_entries as kernel

        kernel.write_entries(table, writes)
        return
    indices, values = writes
    table.view(-1).index_copy_(0, indices.long(), values)
