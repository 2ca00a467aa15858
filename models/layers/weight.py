"""Copies checkpoint tensors into parameters."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

ShardId = int | tuple[int | None, int]
"""Which of the tensors packed into a parameter: its index, or (expert id, index) for experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Weights that a checkpoint stores in one format and the model keeps in one.

    stored, kept: formats in words. count: number of parameters, packed ones counting once. bytes:
    their memory on this rank, with scales. rounds_activations: whether products round their input.
    """

    stored: str
    kept: str
    count: int
    bytes: int
    rounds_activations: bool


class ExpertTensor(NamedTuple):
    """Where a model keeps one checkpoint tensor of its experts.

    Both names are the ends of full names, from the module that holds the experts. An entry also
    covers the tensor's scales: `experts.w2_weight` from `experts.0.down_proj.weight` implies
    `experts.w2_weight_scale` from `experts.0.down_proj.weight_scale`, if the model has such a
    parameter.
    """

    parameter: str
    checkpoint_name: str
    expert_id: int | None
    """None for a tensor that stacks all experts."""
    part: int
    """Which of the tensors packed into an expert's share of the parameter, from 0."""


@runtime_checkable
class LoadsWeights(Protocol):
    """A layer that fills its own parameters from whole checkpoint tensors."""

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies this rank's share of `loaded` into `param`. Several threads call it.

        `shard_id` is the index of the tensor among those packed into `param`; for experts it is
        (expert id, part) as in `expert_mapping`.

        Raises:
            ValueError: `loaded` has another shape than the layer expects.
        """


class Replicated:
    """A layer whose ranks all hold its whole parameters."""

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the whole tensor."""
        check_shape(loaded, tuple(param.shape))
        param.copy_(loaded)


class StackedExperts:
    """Parameters [E, N, K] of all experts, each with `num_parts` tensors of equally many rows."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies one tensor of one expert."""
        assert isinstance(shard_id, tuple), "experts are numbered"
        expert, part = shard_id
        assert expert is not None, "each expert is stored by itself"
        num_rows = param.shape[1] // self._num_parts
        check_shape(loaded, (num_rows, *param.shape[2:]))
        param[expert].narrow(0, part * num_rows, num_rows).copy_(loaded)


def described_weight(layer: nn.Module, name: str) -> str:
    """Returns the parameter of a layer whose values the one of a name scales, shifts or orders.

    A weight's own name stays, also where it only sounds like that of a scale.
    """
    weight = "weight" if name.startswith("weight_") else name.removesuffix("_scale")
    return weight if weight in layer._parameters else name


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Returns a parameter without values, by default of torch's default dtype, not trained."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def check_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless a checkpoint tensor has the expected shape."""
    if tuple(loaded.shape) != expected:
        raise ValueError(f"its shape is {tuple(loaded.shape)}; the model needs {expected}")
