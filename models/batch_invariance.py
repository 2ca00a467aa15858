"""Batch-invariant mode: a row of logits has the same bits whatever else is in its step.

Operators that could depend on the number of tokens, on a row's place among them or on how a prompt
is cut into chunks then run in one fixed way for each row:

| operator | GPU | CPU |
|---|---|---|
| linear, packed_linear | inputs summed in one order, by weight shape | a row at a time |
| add_adapters, adapted_linear | one tiling, one adapter after the other | a row at a time |
| fused operators | the bits of the operators that they replace | these operators |
| attention | keys in parts fixed by position, merged in order | a query at a time |
| latent attention | the same, in the absorbed form | a query at a time |
| attention to an index's choice | one program; equal scores in order | a query at a time |
| fused_moe | tensor cores, whatever shares a tile | a row at a time |
| expert_parallel_moe | the same, one rank for each expert | the same |
| all_reduce, ordered_reduce_scatter | parts added in rank order | the same |
| norms, gate, rotary | a row at a time; of a head, see arithmetic.mean_square | a row at a time |
"""

from collections.abc import Callable

import torch

_state = {"is_on": False}


def use_batch_invariance(is_on: bool) -> None:
    """Turns the mode on or off for the whole process, which runs one model."""
    _state["is_on"] = is_on


def is_batch_invariant() -> bool:
    """Returns whether the mode is on."""
    return _state["is_on"]


def row_wise(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Returns function(*inputs); on a CPU in the mode it computes one row at a time.

    Torch's functions for CPUs choose their order of summation, and between vector and scalar code,
    by shape and address. Each row is therefore copied to memory of its own and computed alone.

    Args:
        function: maps tensors of T rows to a tensor of T rows.
        inputs: [T, ...] each.
    """
    num_rows = inputs[0].shape[0]
    if not is_batch_invariant() or inputs[0].is_cuda or num_rows == 0:
        return function(*inputs)
    rows = (
        function(*(x[row : row + 1].clone(memory_format=torch.contiguous_format) for x in inputs))
        for row in range(num_rows)
    )
    return torch.cat(list(rows))
