"""Records programs on a CPU under the contract of CUDA graphs, to test graphs without a GPU.

The recorder tapes each operation with its tensors. A replay repeats the operations on the same
tensors and writes each result over the first one. As with a CUDA graph, Python code does not run
again: its decisions and the numbers it computed are fixed.
"""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from models.forward_context import ForwardContext, forward_context, get_forward_context
from services.engine.compilation.graphs.dispatch_mode import DispatchMode
from services.engine.compilation.graphs.recorder import GraphFaultError, Program


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation with its arguments and new tensors.

    context: its forward context, which kernels inside it read.
    """

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Tensor | None, ...]
    """Results with memory of their own; None for views and in-place results."""
    context: ForwardContext | None


@dataclass(frozen=True, slots=True)
class TapeRecording:
    """A program's taped operations, in order."""

    calls: tuple[_Call, ...]
    output: Any

    def replay(self) -> None:
        """Runs the operations again."""
        is_inside = _context_under_way() is not None
        for call in self.calls:
            context = None if is_inside else call.context
            with nullcontext() if context is None else forward_context(context):
                results = _tensors(call.run(*call.args, **call.kwargs))
            for then, now in zip(call.made, results, strict=True):
                if then is not None:
                    then.copy_(now)

    def shared(self) -> "TapeRecording":
        """Returns this recording: each keeps its own memory on a CPU."""
        return self


class ReplayRecorder:
    """Tapes programs; slow, and strict about errors that a GPU would not notice."""

    checks_every_replay = True

    def warm_up(self, program: Program) -> Any:
        """Runs a program."""
        return program()

    def record(self, program: Program) -> TapeRecording:
        """Runs and tapes a program.

        Raises:
            GraphFaultError: it reads a tensor's content.
        """
        with _Tape() as tape:
            output = program()
        return TapeRecording(tuple(tape.calls), output)

    def record_around(self, program: Program, operators: Collection[str]) -> TapeRecording:
        """Runs and tapes a program; taped operators read the replay's context.

        Raises:
            GraphFaultError: it reads a tensor's content, or calls none of the operators.
        """
        recording = self.record(program)
        if not any(call.run._schema.name in operators for call in recording.calls):
            raise GraphFaultError(f"the program calls none of {', '.join(sorted(operators))}")
        return recording

    def num_used_bytes(self) -> int:
        """Returns 0: memory of graphs is not counted on a CPU."""
        return 0


class _Tape(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs and tapes an operation."""
        if _reads_content(func, args):
            raise GraphFaultError(f"the program reads a tensor's content, by {func}")
        result = func(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        made = tuple(None if _memory(tensor) in given else tensor for tensor in _tensors(result))
        self.calls.append(_Call(func, args, kwargs, made, _context_under_way()))
        return result


def _reads_content(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the result, or its shape, depends on a read by the host."""
    if func is torch.ops.aten.index.Tensor:
        return any(tensor.dtype is torch.bool for tensor in _tensors(args[1]))
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func is torch.ops.aten.is_nonzero.default or not tags.isdisjoint(func.tags)


def _context_under_way() -> ForwardContext | None:
    try:
        return get_forward_context()
    except RuntimeError:
        return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
