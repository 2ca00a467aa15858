"""Products whose sum over ranks begins while they are computed: octavo::linear_reduce_scatter.

Layers do not call it: a compiler's pass inserts it.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models".
"""

import torch

from models.ops.communication.sequence_parallel_norm import shares_rows
from models.ops.custom_op import direct_register_custom_op
from models.ops.linear.linear import linear
from models.parallel.collectives import begin_reduce_scatter, finish, in_shares, own_rows

_NUM_CHUNKS = 4
"""Parts of a share; the transfer of one runs under the product of the next."""


def _linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    group: str,
) -> torch.Tensor:
    """Returns linear(x) [T, N]; where ranks share rows, this rank's are the sum over the ranks.

    The rows of other ranks are undefined then. The first arguments are those of linear.
    """
    num_rows, num_features = x.shape[0], weight.shape[0]
    if not shares_rows(x.new_empty((num_rows, num_features)), group):
        return linear(x, weight, bias, weight_scale)
    shares = in_shares(x, group)
    size, num_own, _ = shares.shape
    output = x.new_empty((size * num_own, num_features))
    own = output[own_rows(len(output), group)]
    step = -(-num_own // _NUM_CHUNKS)
    # The products stay until their transfers end.
    begun = []
    for rows, share in zip(torch.split(shares, step, 1), torch.split(own, step), strict=True):
        product = linear(rows.reshape(-1, x.shape[1]), weight, bias, weight_scale)
        begun.append((begin_reduce_scatter(share, product, group), product))
    for work, _ in begun:
        finish(work)
    return output[:num_rows]


def _fake_linear_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, *others: object
) -> torch.Tensor:
    del others
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


linear_reduce_scatter = direct_register_custom_op(
    "linear_reduce_scatter", _linear_reduce_scatter, (), _fake_linear_reduce_scatter
)
