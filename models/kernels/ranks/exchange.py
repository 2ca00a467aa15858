"""Launches the kernels that communicate through memory which all ranks write into."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton

from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch
from models.kernels.ranks.all_reduce_norm import all_reduce_norm_kernel
from models.kernels.ranks.gather_rows import gather_rows_kernel, reduce_scatter_kernel
from models.kernels.ranks.rank_memory import RankMemory
from models.kernels.ranks.two_shot_norm import two_shot_norm_kernel
from models.number_formats import BLOCK, FP8
from models.operands.token_scales import empty_token_scales
from models.parallel.collectives import LostPeerError

_VECTOR = 8
"""Elements of 16 bits in a vector of 16 bytes."""
_THREADS_OF_WARP = 32
_MOST_THREADS = 1024
_KERNELS = {
    "all_reduce_norm": all_reduce_norm_kernel,
    "two_shot_norm": two_shot_norm_kernel,
    "gather_rows": gather_rows_kernel,
    "reduce_scatter": reduce_scatter_kernel,
}

TWO_SHOT_BYTES = {4: 512 * 2**10, 8: 256 * 2**10}
"""Ranks -> bytes of a rank's rows from which each rank sums a share of them and sends it on.

With fewer ranks than any key that never moves fewer bytes; other numbers take the next lower key.
"""


class RankMissingError(LostPeerError):
    """A rank did not send its rows in time; the message names it."""


class Exchange:
    """Collectives of rows: sums with the residual stream and the norm, gathers, reduce-scatters.

    Every rank makes one and calls it with the same numbers of rows in the same order. Its memory
    stays where it is, so calls can be captured in a graph.
    """

    def __init__(self, memory: RankMemory, *, timeout_s: float) -> None:
        """Takes this rank's memory; a rank waits for another one for timeout_s."""
        self._memory = memory
        self._rank = memory.rank
        _, self._size, self._max_rows, self._hidden_size = memory.slots.shape
        device = memory.slots.device
        self._peers = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        self._phases = torch.zeros(self._max_rows, dtype=torch.int32, device=device)
        self._missing = torch.zeros(1, dtype=torch.int32, device=device)
        self._report = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        properties = torch.cuda.get_device_properties(device)
        self._num_programs = properties.multi_processor_count
        clock_rate = getattr(properties, "clock_rate", 2_000_000)  # kHz
        self._max_cycles = int(timeout_s * clock_rate * 1000)

    def fits(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the sum's kernel takes these tensors: contiguous vectors of its dtype."""
        dtype = self._memory.slots.dtype
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
        num_bytes = num_tokens * self._hidden_size * self._memory.slots.dtype.itemsize
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
        normed = torch.empty_like(residual)
        self._add_norm(x, residual, weight, eps, normed, None, self._hidden_size)
        return normed

    def add_rounded_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        is_blocked: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs add_norm; returns its result rounded to FP8, [T, H], and the scales.

        The bits are those of a launch that rounds the result of add_norm.

        Args:
            x: [T, H], or its addends [S, T, H] in float32, contiguous.
            residual: [T, H], equal on all ranks, contiguous.
            weight: [H].
            eps: added to the mean square.
            is_blocked: whether each 128 features of a token have a scale, or the token has one.
        """
        num_groups = triton.cdiv(self._hidden_size, BLOCK) if is_blocked else 1
        scale = empty_token_scales(residual.shape[0], num_groups, x.device)
        rounded = torch.empty_like(residual, dtype=FP8)
        group = BLOCK if num_groups > 1 else self._hidden_size
        self._add_norm(x, residual, weight, eps, rounded, scale, group)
        return rounded, scale

    def _add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        normed: torch.Tensor,
        scale: torch.Tensor | None,
        group: int,
    ) -> None:
        """Launches the sum of few or many rows, as often as the memory demands."""
        num_parts = x.shape[0] if x.dim() > residual.dim() else 0
        num_tokens = residual.shape[0]
        kernel = "two_shot_norm" if self.is_two_shot(num_tokens) else "all_reduce_norm"
        launch = self._launcher(kernel, PARTS=num_parts, GROUP=group)
        for first in range(0, num_tokens, self._max_rows):
            rows = slice(first, min(first + self._max_rows, num_tokens))
            # The parts of a slice do not follow each other.
            addends = x[:, rows].contiguous() if num_parts else x[rows]
            launch(
                self._grid(rows.stop - first),
                addends, residual[rows], weight, normed[rows],
                None if scale is None else scale[rows], *self._state, eps, rows.stop - first,
                0 if scale is None else scale.stride(1), self._max_cycles,
            )  # fmt: skip

    def takes_rows(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether gather_rows and reduce_scatter take rows of one rank: few, of its dtype.

        All ranks answer alike.
        """
        is_size = len(shape) == 2 and shape[1] == self._hidden_size
        return is_size and 0 < shape[0] <= self._max_rows and dtype == self._memory.slots.dtype

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns every rank's rows, [ranks * T, H], in rank order: the same bits on all ranks.

        Two adjacent zeros, from an even column on, become positive.

        x: [T, H] that takes_rows takes, of one shape on all ranks.
        """
        gathered = x.new_empty((self._size * x.shape[0], self._hidden_size))
        launch = self._launcher("gather_rows")
        num_rows = x.shape[0]
        launch(
            self._grid(num_rows), _vectors(x), gathered, *self._state, num_rows, self._max_cycles
        )
        return gathered

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows, [T, H], of the sum of every rank's x.

        The sum is in float32, rank after rank from rank 0 on, and rounded once.

        x: [ranks * T, H], of one shape on all ranks; takes_rows takes [T, H].
        """
        num_rows = x.shape[0] // self._size
        share = x.new_empty((num_rows, self._hidden_size))
        launch = self._launcher("reduce_scatter")
        launch(self._grid(num_rows), _vectors(x), share, *self._state, num_rows, self._max_cycles)
        return share

    def check(self) -> None:
        """Raises RankMissingError if a rank was late in any call that has ended."""
        missing = int(self._report[0])
        if missing:
            number = self._memory.numbers[missing - 1]
            raise RankMissingError(f"rank {number} did not send its rows in time")

    @property
    def _state(self) -> tuple[torch.Tensor, ...]:
        """The kernels' arguments that do not change."""
        return self._peers, self._phases, self._missing, self._report

    def _grid(self, num_rows: int) -> tuple[int, int, int]:
        return min(num_rows, self._num_programs), 1, 1

    def _launcher(self, kernel: str, **constants: int) -> Launch:
        device = self._memory.slots.device
        return launcher(
            kernel, self._hidden_size, self._rank, self._size, self._max_rows, device, **constants
        )


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """Returns x contiguous from an address of a vector on."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@lru_cache
def launcher(
    kernel: str,
    size: int,
    rank: int,
    num_ranks: int,
    max_rows: int,
    device: torch.device,
    **constants: int,
) -> Launch:
    """Returns a kernel, by its name, for rows of a size, as one of several ranks launches it."""
    # One thread for each vector: two threads that read the same one would clear it for each other.
    vectors = max(_THREADS_OF_WARP, triton.next_power_of_2(size // _VECTOR))
    return Launch(
        _KERNELS[kernel], SIZE=size, RANK=rank, RANKS=num_ranks, MOST_ROWS=max_rows,
        VECTORS=vectors, num_warps=min(vectors, _MOST_THREADS) // _THREADS_OF_WARP,
        **launch_options(device), **constants,
    )  # fmt: skip
