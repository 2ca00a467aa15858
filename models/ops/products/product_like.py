"""Outputs of operators that multiply, for tracing."""

from collections.abc import Callable

import torch


def product_like(
    x: str, weight: str = "weight", gate: str = "is_gated", *, is_gated: bool = False
) -> Callable[..., torch.Tensor]:
    """Returns what makes an output from an operator's arguments.

    It has a feature for each row of the weight, with a gate for each two, without a weight as x.

    Args:
        x: name of the argument [..., K] with the output's tokens and dtype.
        weight: name of the last weight.
        gate: name of the argument that says whether a gate follows it.
        is_gated: whether one does if there is no such argument.
    """

    def output(**given: torch.Tensor) -> torch.Tensor:
        rows, last = given[x], given[weight]
        if last is None:
            return rows.new_empty(rows.shape)
        num_rows = 2 if given.get(gate, is_gated) else 1
        return rows.new_empty((*rows.shape[:-1], last.shape[0] // num_rows))

    return output
