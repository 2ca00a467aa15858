"""Memory that all ranks of a group write into, and the all-reduce that uses it."""

import os
from functools import lru_cache

import torch
import torch.distributed as dist
import triton

from models.ops.triton.communication.all_reduce_norm import all_reduce_norm_kernel
from models.ops.triton.communication.two_shot_norm import two_shot_norm_kernel
from models.ops.triton.launching.dependent_launch import launch_options
from models.ops.triton.launching.launch import Launch
from models.parallel.collectives import LostPeerError

_NUM_BUFFERS = 2
_VECTOR = 8
"""Elements of 16 bits in a vector of 16 bytes."""
_THREADS_OF_WARP = 32
_MOST_THREADS = 1024
MOST_BYTES = 8 * 2**20
"""Memory for the rows that one rank sends at once; more rows are sent in several launches."""

TWO_SHOT_BYTES = {4: 512 * 2**10, 8: 256 * 2**10}
"""Ranks -> bytes of a rank's rows from which each rank sums a share of them and sends it on.

With fewer ranks than any key that never moves fewer bytes; other numbers take the next lower key.
"""


class RankMissingError(LostPeerError):
    """A rank did not send its part in time; the message names it."""


class Exchange:
    """The sum of all ranks' rows, added to the residual stream and normalised: on every rank alike.

    Every rank makes one and calls it with the same numbers of rows in the same order. Its memory
    stays where it is, so calls can be captured in a graph.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Allocates the memory and waits until all ranks have.

        Args:
            group: of processes on one host, each with a GPU that can reach the others' memory.
            hidden_size: elements of a row, a multiple of 8.
            dtype: of rows, of 16 bits.
            device: this rank's GPU.
            timeout_s: time that a rank waits for another.

        Raises:
            ValueError: rows do not consist of vectors.
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        # Multicast objects can put a host's GPUs out of service, and nothing here needs them.
        if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
            raise RuntimeError("TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1")
        from torch.distributed import _symmetric_memory as symmetric_memory

        if hidden_size % _VECTOR or dtype.itemsize != 2:
            raise ValueError(f"rows of {hidden_size} {dtype} do not consist of vectors")
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._hidden_size = hidden_size
        self._max_rows = max(1, MOST_BYTES // (hidden_size * dtype.itemsize))
        slots = _NUM_BUFFERS * self._size * self._max_rows
        memory = symmetric_memory.empty(slots * hidden_size, dtype=dtype, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(memory, group)
        handle.barrier()  # no rank writes before all have zeroed
        torch.cuda.synchronize(device)
        self._memory, self._handle = memory, handle
        self._peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._phases = torch.zeros(self._max_rows, dtype=torch.int32, device=device)
        self._missing = torch.zeros(1, dtype=torch.int32, device=device)
        self._report = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        properties = torch.cuda.get_device_properties(device)
        self._num_programs = properties.multi_processor_count
        clock_rate = getattr(properties, "clock_rate", 2_000_000)  # kHz
        self._max_cycles = int(timeout_s * clock_rate * 1000)

    def fits(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernel takes these tensors: contiguous vectors of its dtype."""
        dtype = self._memory.dtype
        return (
            residual.shape[-1] == self._hidden_size
            and residual.dim() == 2
            and x.shape == residual.shape
            and all(each.dtype == dtype for each in (x, residual, weight))
            and all(each.is_contiguous() for each in (x, residual, weight))
            and not any(each.data_ptr() % 16 for each in (x, residual, weight))
        )

    def is_two_shot(self, num_tokens: int) -> bool:
        """Whether ranks sum shares of that many rows; the bits are the same either way."""
        bounds = [bound for ranks, bound in TWO_SHOT_BYTES.items() if ranks <= self._size]
        num_bytes = num_tokens * self._hidden_size * self._memory.dtype.itemsize
        return bool(bounds) and num_bytes >= min(bounds)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds all ranks' x to the residual stream in place; returns the normalised sum.

        All ranks get the same bits: the sum is in float32, rank after rank, and rounded once.

        Args:
            x: [T, H], or its addends [S, T, H] in float32, contiguous.
            residual: [T, H], equal on all ranks, contiguous.
            weight: [H].
            eps: added to the mean square.
        """
        num_parts = x.shape[0] if x.dim() > residual.dim() else 0
        num_tokens = residual.shape[0]
        normed = torch.empty_like(residual)
        launch = launcher(
            self._hidden_size, self._rank, self._size, self._max_rows, num_parts,
            self.is_two_shot(num_tokens), x.device,
        )  # fmt: skip
        for first in range(0, num_tokens, self._max_rows):
            rows = slice(first, min(first + self._max_rows, num_tokens))
            num_rows = rows.stop - first
            # The parts of a slice do not follow each other.
            addends = x[:, rows].contiguous() if num_parts else x[rows]
            launch(
                (min(num_rows, self._num_programs), 1, 1),
                addends, residual[rows], weight, normed[rows], self._peers, self._phases,
                self._missing, self._report, eps, num_rows, self._max_cycles,
            )  # fmt: skip
        return normed

    def check(self) -> None:
        """Raises RankMissingError if a rank was late in any call that has ended."""
        missing = int(self._report[0])
        if missing:
            raise RankMissingError(f"rank {missing - 1} did not send its part of a sum in time")


@lru_cache
def launcher(  # constants of one kernel
    size: int,
    rank: int,
    num_ranks: int,
    max_rows: int,
    num_parts: int,
    is_two_shot: bool,
    device: torch.device,
) -> Launch:
    """Returns the kernel for rows of a size, as one of several ranks launches it."""
    # One thread for each vector: two threads that read the same one would clear it for each other.
    vectors = max(_THREADS_OF_WARP, triton.next_power_of_2(size // _VECTOR))
    kernel = two_shot_norm_kernel if is_two_shot else all_reduce_norm_kernel
    return Launch(
        kernel, SIZE=size, RANK=rank, RANKS=num_ranks, MOST_ROWS=max_rows,
        PARTS=num_parts, VECTORS=vectors,
        num_warps=min(vectors, _MOST_THREADS) // _THREADS_OF_WARP, **launch_options(device),
    )  # fmt: skip
