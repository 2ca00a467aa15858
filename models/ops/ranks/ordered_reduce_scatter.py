"""The sum that ends the experts of data-parallel ranks, in rank order.

octavo::ordered_reduce_scatter, for batch-invariant mode: the order in which a collective adds up
depends on the number of rows and on the rank that gets them.
"""

import torch

from models.ops.custom_op import operator
from models.ops.ranks.all_reduce import sum_in_order
from models.parallel.collectives import exchange_shares


@operator(lambda x, size, **_: x.new_empty((x.shape[0] // size, *x.shape[1:])))
def ordered_reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Returns this rank's rows, [T, H], of the sum of every rank's x.

    x: [size * T, H], of one shape on all ranks; the rows of `gather_rows`.
    group: the group's name.
    size: number of its ranks.
    """
    shares = x.contiguous().view(size, -1, *x.shape[1:])
    parts = torch.empty_like(shares)
    exchange_shares(parts, shares, group)
    return sum_in_order(parts)
