"""Concatenations over the ranks of a group: octavo::all_gather."""

import torch

from models.ops.custom_op import operator
from models.parallel.collectives import gather_into


@operator(lambda x, size, **_: x.new_empty((*x.shape[:-1], size * x.shape[-1])))
def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Returns every rank's x, concatenated along the last dimension in rank order.

    x: of one shape on all ranks.
    group: the group's name.
    size: number of its ranks.
    """
    stacked = x.new_empty((size, *x.shape))
    gather_into(stacked, x.contiguous(), group)
    return stacked.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])
