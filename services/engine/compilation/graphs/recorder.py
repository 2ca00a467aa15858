"""The contract of captured graphs on any device.

A program takes no arguments: it reads tensors at fixed addresses and returns a tensor. Recording it
runs it once; a replay repeats its operations on the present content of the same memory. Results of
Python code and shapes stay as recorded.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Program: TypeAlias = Callable[[], Any]
Inputs: TypeAlias = Mapping[str, Tensor]
"""The tensors that a program reads and others write, by name."""


class GraphFaultError(Exception):
    """A graph cannot be captured, or would compute something else than its program."""


class Recording(Protocol):
    """A program that was recorded."""

    @property
    def output(self) -> Any:
        """The program's result; each replay overwrites it."""

    def replay(self) -> None:
        """Repeats the program's operations."""

    def shared(self) -> "Recording":
        """Returns this recording with its output's memory released to later recordings.

        A replay's result is valid until the next replay of a graph in the same memory.
        """


class GraphRecorder(Protocol):
    """Records programs."""

    @property
    def checks_every_replay(self) -> bool:
        """Whether inputs are compared before every replay, not only before the first."""

    def warm_up(self, program: Program) -> Any:
        """Runs a program as `record` will, which requires it; returns the program's result.

        Raises:
            GraphFaultError: it cannot be recorded.
        """

    def record(self, program: Program) -> Recording:
        """Records a program; it depends on the device whether this computes it.

        Raises:
            GraphFaultError: it cannot be repeated.
        """

    def record_around(self, program: Program, operators: Collection[str]) -> Recording:
        """Records a program between the calls of some operators.

        A replay calls these with the recorded tensors and its own forward context. They return
        nothing.

        Args:
            program: as for `record`.
            operators: as namespace::name.

        Raises:
            GraphFaultError: the program cannot be repeated, or calls none of the operators.
        """

    def num_used_bytes(self) -> int:
        """Returns the device memory in use, in bytes; only differences are meaningful."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's address and layout."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class FixedInputs:
    """The addresses of inputs when a graph was captured."""

    def __init__(self, inputs: Inputs) -> None:
        self._places = {name: _place(tensor) for name, tensor in inputs.items()}

    def check(self, inputs: Inputs) -> None:
        """Raises GraphFaultError unless the inputs are the same and at the same addresses."""
        if extra := sorted(inputs.keys() ^ self._places.keys()):
            raise GraphFaultError(f"the graph was captured without or only with inputs {extra}")
        for name, tensor in inputs.items():
            then, now = self._places[name], _place(tensor)
            if now != then:
                raise GraphFaultError(f"input {name} is {now}; when captured it was {then}")


def _place(tensor: Tensor) -> _Place:
    return _Place(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
