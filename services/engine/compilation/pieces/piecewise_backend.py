"""A compiled piece at run time: selects the kernels for the step's number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

from services.engine.compilation.pieces.compiler_interface import Runnable
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.program.compile_range import ANY_TOKENS, CompileRange
from services.engine.compilation.program.graph_signature import has_one_output, with_tuple_output


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcreteSizeEntry:
    """A piece compiled for one number of tokens."""

    runtime_shape: int
    runnable: Runnable


class PiecewiseBackend:
    """One piece, compiled for a range of numbers of tokens and also for particular ones.

    `__init__` compiles everything; a call only selects.
    """

    def __init__(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        *,
        manager: CompilerManager,
        compile_range: CompileRange = ANY_TOKENS,
        compile_sizes: Sequence[int] = (),
    ) -> None:
        """Compiles the piece.

        Args:
            graph: its output may be one tensor or a tuple.
            example_inputs: fake tensors and symbolic integers, one per placeholder.
            manager: compiles pieces or finds compiled ones.
            compile_range: numbers of tokens that it runs.
            compile_sizes: numbers of tokens with kernels of their own, if in the range.
        """
        self._has_one_output = has_one_output(graph)
        if self._has_one_output:
            graph = with_tuple_output(graph)
        self._shape_of = _num_tokens_reader(example_inputs)
        self.compiled_graph_for_general_shape = manager.compile(
            graph, example_inputs, typical=compile_range.typical
        )
        self.concrete_size_entries: dict[int, ConcreteSizeEntry] = {}
        if self._shape_of is not None:
            for size in filter(compile_range.__contains__, compile_sizes):
                concrete = [_concrete(value, size) for value in example_inputs]
                runnable = manager.compile(graph, concrete, runtime_shape=size)
                # Its kernels are tuned at their first run, which must not happen while serving.
                runnable(*concrete)
                self.concrete_size_entries[size] = ConcreteSizeEntry(
                    runtime_shape=size, runnable=runnable
                )

    def __call__(self, *args: Any) -> Any:
        """Runs the piece on the inputs of its graph."""
        run = self.compiled_graph_for_general_shape
        if self.concrete_size_entries:
            assert self._shape_of is not None, "only pieces that see tokens have sizes"
            entry = self.concrete_size_entries.get(self._shape_of(args))
            if entry is not None:
                run = entry.runnable
        outputs = run(*args)
        return outputs[0] if self._has_one_output else outputs


def _num_tokens_reader(example_inputs: Sequence[Any]) -> Callable[[Sequence[Any]], int] | None:
    """Returns a reader of the number of tokens from a piece's inputs; None if none has it."""
    for index, value in enumerate(example_inputs):
        if isinstance(value, SymInt):
            return lambda args: int(args[index])
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                # A product of the number of tokens with a constant is not the number.
                if isinstance(size, SymInt) and size.node.expr.is_symbol:
                    return lambda args: int(args[index].shape[dim])
    return None


def _concrete(value: Any, num_tokens: int) -> Any:
    """Returns a concrete input like the symbolic `value`, for one number of tokens."""

    def settle(size: Any) -> int:
        if not isinstance(size, SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))

    if isinstance(value, SymInt):
        return settle(value)
    if not isinstance(value, Tensor):
        return value
    shape = [settle(size) for size in value.shape]
    stride = [settle(step) for step in value.stride()]
    # Zeros are valid token ids and positions, which the piece is run with once.
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).zero_()
