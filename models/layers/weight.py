"""Copies checkpoint tensors into parameters."""

from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class LoadsWeights(Protocol):
    """A layer that fills its own parameters from whole checkpoint tensors."""

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's share of `loaded` into its place in `param`.

        `shard_id` says which of the tensors packed into `param` this is, from 0.

        Raises:
            ValueError: `loaded` has another shape than the layer expects.
        """


def empty_parameter(*shape: int) -> nn.Parameter:
    """Returns a parameter without values, of torch's default dtype and device, not trained."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def check_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless a checkpoint tensor has the expected shape."""
    if tuple(loaded.shape) != expected:
        raise ValueError(f"its shape is {tuple(loaded.shape)}; the model needs {expected}")
