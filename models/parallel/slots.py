"""Moves the tensors of slots between two ranks of a group, and within one."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from models.parallel.collectives import handle_of, needs_peers


def exchange(
    tensors: Sequence[torch.Tensor], peer: int, group: str, *, sends: bool, receives: bool
) -> None:
    """Sends tensors to another rank, fills them with its own, or both; the peer does the opposite.

    Args:
        tensors: contiguous bytes, equally many and long on both ranks.
        peer: the other rank's number in the group.
        group: name of the group.
        sends: whether the other rank gets these.
        receives: whether these get the other rank's.
    """
    handle = handle_of(group)
    is_swap = sends and receives
    received = [torch.empty_like(each) for each in tensors] if is_swap else tensors
    operations = []
    if sends:
        operations += [dist.P2POp(dist.isend, each, None, handle, 0, peer) for each in tensors]
    if receives:
        operations += [dist.P2POp(dist.irecv, each, None, handle, 0, peer) for each in received]
    # Not counted as a collective: other ranks have no part in it.
    with needs_peers():
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    if is_swap:
        for each, other in zip(tensors, received, strict=True):
            each.copy_(other)


def copy_slot(tensors: Sequence[torch.Tensor], source: int, target: int, *, is_swap: bool) -> None:
    """Copies one slot of stacked tensors to another slot, or swaps the two."""
    for each in tensors:
        replaced = each[target].clone() if is_swap else None
        each[target].copy_(each[source])
        if replaced is not None:
            each[source].copy_(replaced)
