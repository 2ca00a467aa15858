"""The tokens of all data-parallel ranks, gathered before experts and shared out after them.

octavo::gather_rows and octavo::reduce_scatter. All ranks of the group have equally many rows. Where
the group has kernels of its own and rows are few, those run instead of the group's library.
"""

import torch

from models.ops.custom_op import operator
from models.parallel.collectives import begun, fused_rows, gather_into, reduce_scatter_into


@operator(lambda x, size, **_: x.new_empty((size * x.shape[0], *x.shape[1:])))
def gather_rows(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Returns every rank's rows, [size * T, H], in rank order.

    x: [T, H], of one shape on all ranks.
    group: the group's name.
    size: number of its ranks.
    """
    fused = fused_rows(group)
    if fused is not None and fused.takes_rows(x.shape, x.dtype):
        with begun():
            return fused.gather_rows(x)
    stacked = x.new_empty((size, *x.shape))
    gather_into(stacked, x.contiguous(), group)
    return stacked.flatten(0, 1)


@operator(lambda x, size, **_: x.new_empty((x.shape[0] // size, *x.shape[1:])))
def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Returns this rank's rows, [T, H], of the sum of every rank's x.

    x: [size * T, H], of one shape on all ranks; the rows of `gather_rows`.
    group: the group's name.
    size: number of its ranks.
    """
    shape = (x.shape[0] // size, *x.shape[1:])
    fused = fused_rows(group)
    if fused is not None and fused.takes_rows(shape, x.dtype):
        with begun():
            return fused.reduce_scatter(x)
    share = x.new_empty(shape)
    reduce_scatter_into(share, x.contiguous(), group)
    return share
