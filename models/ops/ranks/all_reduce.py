"""Sums over the ranks of a group: octavo::all_reduce."""

import torch

from models.batch_invariance import is_batch_invariant
from models.ops.custom_op import like, operator
from models.parallel.collectives import gather_into, num_ranks, sum_in_place


@operator(like("x"))
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the sum of every rank's x; all ranks get the same bits.

    x: of one shape on all ranks.
    group: the group's name.
    """
    if is_batch_invariant():
        return _sum_in_rank_order(x, group)
    # A copy: torch's collectives work in place, and a compiler may use x again.
    output = x.clone(memory_format=torch.contiguous_format)
    sum_in_place(output, group)
    return output


def _sum_in_rank_order(x: torch.Tensor, group: str) -> torch.Tensor:
    """Adds all ranks' x one after the other; a collective's order depends on the size of x."""
    parts = x.new_empty((num_ranks(group), *x.shape))
    gather_into(parts, x.contiguous(), group)
    return sum_in_order(parts)


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Adds up the parts of a stack [n, ...], the first ones first, and rounds once."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
