"""The contract of captured graphs, whatever records them.

A program takes no arguments: it reads tensors at fixed addresses and returns a tensor. Recording it
runs it once; replaying repeats its operations on the same memory, whatever that holds by then.
Python code, shapes and numbers are those of the recording.
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
    """A graph cannot be captured, or would not compute what its program computes."""


class Recording(Protocol):
    """A program that was recorded."""

    @property
    def output(self) -> Any:
        """The program's result; each replay writes it again, at the same addresses."""

    def replay(self) -> None:
        """Repeats the program's operations."""

    def shared(self) -> "Recording":
        """Returns this recording, but leaves the memory of its output to those made after it.

        A replay's result is good until any graph that shares the memory is replayed.
        """


class GraphRecorder(Protocol):
    """Records programs."""

    @property
    def checks_every_replay(self) -> bool:
        """Whether inputs are compared before each replay, rather than before the first only."""

    def warm_up(self, program: Program) -> Any:
        """Runs a program as `record` will, which it must precede; returns what the program does.

        Raises:
            GraphFaultError: it does something that cannot be recorded.
        """

    def record(self, program: Program) -> Recording:
        """Records what a program does. Whether it is computed too depends on the device.

        Raises:
            GraphFaultError: it does something that cannot be repeated.
        """

    def record_around(self, program: Program, operators: Collection[str]) -> Recording:
        """Records what a program does between the calls of some operators.

        A replay calls them again, with the tensors of the recording: they read the forward context
        of the replay. They return nothing.

        Args:
            program: what to record. Whether it is computed too depends on the device.
            operators: as namespace::name.

        Raises:
            GraphFaultError: it does something that cannot be repeated, or calls none of them.
        """

    def num_used_bytes(self) -> int:
        """Returns the device's memory in use, in bytes; only differences mean something."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies and how it is read."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class FixedInputs:
    """Remembers where inputs were when a graph was captured."""

    def __init__(self, inputs: Inputs) -> None:
        self._places = {name: _place(tensor) for name, tensor in inputs.items()}

    def check(self, inputs: Inputs) -> None:
        """Raises GraphFaultError unless the inputs are those of the capture, where they were."""
        if extra := sorted(inputs.keys() ^ self._places.keys()):
            raise GraphFaultError(f"the graph was captured without or only with inputs {extra}")
        for name, tensor in inputs.items():
            then, now = self._places[name], _place(tensor)
            if now != then:
                raise GraphFaultError(f"input {name} is {now}; when captured it was {then}")


def _place(tensor: Tensor) -> _Place:
    return _Place(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
