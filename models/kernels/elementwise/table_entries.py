"""Scattered writes to a table of integers, in one kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch

_BLOCK = 256


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=["writes_ptr", "num_writes"])
def _write_entries_kernel(table_ptr, writes_ptr, num_writes, BLOCK: tl.constexpr):
    write = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_write = write < num_writes
    index = tl.load(writes_ptr + write, mask=is_write, other=0)
    value = tl.load(writes_ptr + num_writes + write, mask=is_write, other=0)
    tl.store(table_ptr + index, value, mask=is_write)


def write_entries(table: torch.Tensor, writes: torch.Tensor) -> None:
    """Overwrites entries of a table; see models.ops.elementwise.table_entries.write_entries."""
    num_writes = writes.shape[1]
    launch = _launcher(table.device)
    launch((triton.cdiv(num_writes, _BLOCK), 1, 1), table, writes, num_writes)


@lru_cache
def _launcher(device: torch.device) -> Launch:
    del device
    return Launch(_write_entries_kernel, BLOCK=_BLOCK, num_warps=4)
