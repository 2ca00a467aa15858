"""The gate of a feed-forward layer with gelu: octavo::gelu_and_mul, for batch-invariant mode.

In other modes a compiler sees the operations and joins them with their neighbours.
"""

import torch
from torch.nn import functional

from models.batch_invariance import is_batch_invariant, row_wise
from models.ops.custom_op import direct_register_custom_op


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns gelu(gate) * up of [T, 2 * I] that holds gate, then up: [T, I].

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; gelu is the form with tanh.
    """
    return _operator(x) if is_batch_invariant() else _gated(x)


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _by_row(x: torch.Tensor) -> torch.Tensor:
    return row_wise(_gated, x.contiguous())


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_operator = direct_register_custom_op("gelu_and_mul", _by_row, (), _fake)
