"""Memory for rows on each GPU, which all ranks of a group write into."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

MOST_BYTES = 8 * 2**20
"""Memory for the rows that one rank sends at once."""

_NUM_BUFFERS = 2
_VECTOR = 8
"""Elements of 16 bits in a vector of 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory, and where that of each rank is.

    rank: this one's number in the group.
    slots: [2, ranks, rows, H], this rank's memory: a slot for each row of each rank, twice. Zeros
        until all ranks have their own.
    addresses: of all ranks' slots, as this rank reaches them.
    numbers: of all ranks of the group, among the ranks of all groups.
    handle: of torch, which keeps the others' memory reachable; None where this process has all.
    """

    rank: int
    slots: torch.Tensor
    addresses: tuple[int, ...]
    numbers: tuple[int, ...]
    handle: object

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Allocates the memory and waits until all ranks have.

        Args:
            group: of processes on one host, each with a GPU that can reach the others' memory.
            hidden_size: elements of a row, a multiple of 8.
            dtype: of rows, of 16 bits.
            device: this rank's GPU.

        Raises:
            ValueError: rows do not consist of vectors.
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        # Multicast objects can put a host's GPUs out of service, and nothing here needs them.
        if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
            raise RuntimeError("TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1")
        from torch.distributed import _symmetric_memory as symmetric_memory

        shape = shape_of(dist.get_world_size(group), hidden_size, dtype)
        slots = symmetric_memory.empty(shape, dtype=dtype, device=device)
        slots.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(slots, group)
        handle.barrier()  # no rank writes before all have zeroed
        torch.cuda.synchronize(device)
        rank = dist.get_rank(group)
        return cls(
            rank=rank,
            slots=slots,
            addresses=addresses_in(handle.buffer_ptrs, rank, slots.data_ptr()),
            numbers=tuple(dist.get_process_group_ranks(group)),
            handle=handle,
        )


def addresses_in(buffers: Sequence[int], rank: int, own_address: int) -> tuple[int, ...]:
    """Returns the addresses of all ranks' slots, which all ranks have at one place of a buffer.

    torch may take a tensor from a larger buffer (torch 2.13, TORCH_SYMMMEM_IMPLICIT_POOL).

    Args:
        buffers: addresses of all ranks' buffers, as this rank reaches them.
        rank: this one's number in the group.
        own_address: of its slots.
    """
    offset = own_address - buffers[rank]
    return tuple(each + offset for each in buffers)


def shape_of(num_ranks: int, hidden_size: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Returns the shape of a rank's slots: buffers, ranks, rows, elements of a row.

    Raises:
        ValueError: rows do not consist of vectors.
    """
    if hidden_size % _VECTOR or dtype.itemsize != 2:
        raise ValueError(f"rows of {hidden_size} {dtype} do not consist of vectors")
    num_rows = max(1, MOST_BYTES // (hidden_size * dtype.itemsize))
    return _NUM_BUFFERS, num_ranks, num_rows, hidden_size
