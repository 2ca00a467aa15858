"""Collectives over a named group of ranks.

Every rank of a group calls the same ones in the same order; a rank that leaves one out stops all.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 has given it another name."""

_handles: dict[str, dist.ProcessGroup] = {}


class LostPeerError(Exception):
    """A collective failed, because another rank is gone or does something else."""


class _Silence(threading.local):
    """Whether a thread's collectives leave the other ranks alone."""

    is_on: bool = False


_silence = _Silence()
_counts = {"issued": 0}


def use_process_group(name: str, handle: dist.ProcessGroup) -> None:
    """Makes collectives of a group run on torch's process group; without it, on the default one."""
    _handles[name] = handle


def handle_of(name: str) -> dist.ProcessGroup | None:
    """Returns torch's process group of a group; None for the default one."""
    return _handles.get(name)


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
    with _begun():
        dist.all_reduce(tensor, group=_handles.get(group))


def gather_into(stacked: torch.Tensor, tensor: torch.Tensor, group: str) -> None:
    """Writes every rank's tensor into `stacked`, whose first dimension is the rank.

    Both are contiguous.
    """
    if _silence.is_on:
        stacked.copy_(tensor.expand_as(stacked))
        return
    with _begun():
        _gather(stacked.flatten(0, 1), tensor, group=_handles.get(group))


@contextlib.contextmanager
def _begun() -> Iterator[None]:
    """Counts the collective in the block; its failure becomes a LostPeerError."""
    _counts["issued"] += 1
    with needs_peers():
        yield


@contextlib.contextmanager
def needs_peers() -> Iterator[None]:
    """Makes a failure of the communication in the block a LostPeerError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostPeerError(str(error)) from error
