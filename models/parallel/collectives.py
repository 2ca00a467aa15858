"""Collectives over a named group of ranks, and messages between two.

Every rank of a group calls the same ones in the same order; a rank that leaves one out stops all.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch 2.13 has given both other names."""

_handles: dict[str, dist.ProcessGroup] = {}


class LostPeerError(Exception):
    """A collective failed, because another rank is gone or does something else."""


class FusedSum(Protocol):
    """Adds all ranks' rows to the residual stream and normalises them, in one kernel."""

    def fits(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernel takes these tensors; all ranks answer alike."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds all ranks' x to the residual in place; returns the normalised sum."""

    def add_rounded_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        is_blocked: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs add_norm; returns its result rounded to FP8 and the scales."""

    def check(self) -> None:
        """Raises LostPeerError if a rank was late in a call that has ended."""


class FusedRows(Protocol):
    """Gathers few rows of all ranks, and sums and shares them out, by kernels of our own."""

    def takes_rows(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether the kernels take rows of one rank; all ranks answer alike."""

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns every rank's rows, [ranks * T, H], in rank order."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows, [T, H], of the sum of every rank's x [ranks * T, H]."""

    def check(self) -> None:
        """Raises LostPeerError if a rank was late in a call that has ended."""


_fused: dict[str, FusedSum] = {}
_fused_rows: dict[str, FusedRows] = {}


class _Silence(threading.local):
    """Whether a thread's collectives leave the other ranks alone."""

    is_on: bool = False


_silence = _Silence()
_counts = {"issued": 0}


def use_process_group(name: str, handle: dist.ProcessGroup) -> None:
    """Makes collectives of a group run on torch's process group; without it, on the default one."""
    _handles[name] = handle


def use_fused_sum(name: str, fused: FusedSum) -> None:
    """Makes octavo::all_reduce_norm of a group run as a fused kernel where it fits."""
    _fused[name] = fused


def fused_sum(name: str) -> FusedSum | None:
    """Returns the fused kernel of a group; None without one and without other ranks."""
    return None if _silence.is_on else _fused.get(name)


def use_fused_rows(name: str, fused: FusedRows) -> None:
    """Makes octavo::gather_rows and reduce_scatter of a group run as kernels of our own."""
    _fused_rows[name] = fused


def fused_rows(name: str) -> FusedRows | None:
    """Returns the kernels of a group for few rows; None without them and without other ranks."""
    return None if _silence.is_on else _fused_rows.get(name)


def check_arrivals() -> None:
    """Checks that all ranks sent their parts of fused collectives that have ended.

    Raises:
        LostPeerError: one was late; the message names it.
    """
    checked: list[FusedSum | FusedRows] = [*_fused.values(), *_fused_rows.values()]
    for fused in checked:
        fused.check()


def handle_of(name: str) -> dist.ProcessGroup | None:
    """Returns torch's process group of a group; None for the default one."""
    return _handles.get(name)


def num_ranks(group: str) -> int:
    """Returns the number of a group's ranks."""
    return dist.get_world_size(_handles.get(group))


def num_issued() -> int:
    """Returns how many collectives this process has begun."""
    return _counts["issued"]


@contextlib.contextmanager
def without_other_ranks() -> Iterator[None]:
    """Makes the block's collectives in this thread stand in for themselves.

    They return tensors of the right shape that no other rank has added to. Steps that only build
    kernels or measure memory then run on one rank, whatever the others do.
    """
    before, _silence.is_on = _silence.is_on, True
    try:
        yield
    finally:
        _silence.is_on = before


def sum_in_place(tensor: torch.Tensor, group: str) -> None:
    """Replaces a contiguous tensor by the sum of all ranks' tensors."""
    if _silence.is_on:
        return
    with begun():
        dist.all_reduce(tensor, group=_handles.get(group))


def gather_into(stacked: torch.Tensor, tensor: torch.Tensor, group: str) -> None:
    """Writes every rank's tensor into `stacked`, whose first dimension is the rank.

    Both are contiguous.
    """
    if _silence.is_on:
        stacked.copy_(tensor.expand_as(stacked))
        return
    with begun():
        _gather(stacked.flatten(0, 1), tensor, group=_handles.get(group))


def reduce_scatter_into(share: torch.Tensor, tensor: torch.Tensor, group: str) -> None:
    """Writes this rank's part of the sum of all ranks' tensors into `share`.

    Both are contiguous; `tensor` has a part for each rank, one after the other along the first
    dimension.
    """
    if _silence.is_on:
        share.copy_(tensor[: len(share)])
        return
    with begun():
        _reduce_scatter(share, tensor, group=_handles.get(group))


def exchange_shares(received: torch.Tensor, shares: torch.Tensor, group: str) -> None:
    """Gives every rank its share and takes this rank's from all; both are [ranks, ...].

    Both are contiguous.
    """
    if _silence.is_on:
        received.copy_(shares)
        return
    with begun():
        handle = _handles.get(group)
        dist.all_to_all_single(received.flatten(0, 1), shares.flatten(0, 1), group=handle)


def begin_send(tensor: torch.Tensor, group: str) -> dist.Work | None:
    """Begins to send a contiguous tensor to the second rank of a group of two.

    Returns:
        The message; `finish` it before the tensor's memory is used again. None without others.
    """
    if _silence.is_on:
        return None
    with begun():
        return dist.isend(tensor, group=_handles[group], group_dst=1)


def receive_into(tensor: torch.Tensor, group: str) -> None:
    """Fills a contiguous tensor with what the first rank of a group of two sends."""
    if _silence.is_on:
        return
    with begun():
        work = dist.irecv(tensor, group=_handles[group], group_src=0)
        assert work is not None, "this rank is of the group"
        work.wait()


def finish(work: dist.Work) -> None:
    """Waits until a message has left its tensor; on a GPU, the stream waits."""
    with needs_peers():
        work.wait()


@contextlib.contextmanager
def needs_peers() -> Iterator[None]:
    """Makes a failure of the communication in the block a LostPeerError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostPeerError(str(error)) from error


@contextlib.contextmanager
def begun() -> Iterator[None]:
    """Counts the collective in the block; its failure becomes a LostPeerError."""
    _counts["issued"] += 1
    with needs_peers():
        yield
