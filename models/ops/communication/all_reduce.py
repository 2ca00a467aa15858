"""Sums over the ranks of a group: octavo::all_reduce."""

import torch

from models.ops.custom_op import direct_register_custom_op
from models.parallel.collectives import sum_in_place


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the sum of every rank's x; all ranks get the same bits.

    x: of one shape on all ranks.
    group: the group's name.
    """
    # A copy: torch's collectives work in place, and a compiler may use x again.
    output = x.clone(memory_format=torch.contiguous_format)
    sum_in_place(output, group)
    return output


def _fake_all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    del group
    return torch.empty_like(x, memory_format=torch.contiguous_format)


all_reduce = direct_register_custom_op("all_reduce", _all_reduce, (), _fake_all_reduce)
