"""Runs a compiled program without Dynamo."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from models.forward_context import get_forward_context
from services.engine.compilation.program.program import (
    Input,
    InputSize,
    LayerWeight,
    Output,
    Program,
    Value,
    Weight,
    tensors_of,
)


class LinkedProgram:
    """Runs a program on a step's inputs: no guards, no tracing."""

    def __init__(
        self,
        program: Program,
        runs: Mapping[str, Callable[..., Any]],
        layers: Sequence[nn.Module] = (),
    ) -> None:
        """Binds the parts to their code and to the weights.

        Args:
            program: with LayerWeights of `layers`.
            runs: the code of each part, by its name.
            layers: all layers of the model.
        """
        weights = [tensors_of(layer) for layer in layers]
        given = _given(program)
        self._args: list[Any] = [None] * len(given)
        self._inputs: list[tuple[int, int]] = []
        self._sizes: list[tuple[int, int, int]] = []
        for slot, value in enumerate(given):
            match value:
                case Weight(tensor):
                    self._args[slot] = tensor
                case LayerWeight(layer, name):
                    self._args[slot] = weights[layer][name]
                case Input(number):
                    self._inputs.append((slot, number))
                case InputSize(number, dim):
                    self._sizes.append((slot, number, dim))
        self.graph = _call_graph(program, given)
        """The calls of the parts, for a person to read."""
        # An attribute of the instance goes before the submodule of the same name, and a plain
        # function is called faster than a module.
        self.graph.__dict__.update(runs)
        self._run = self.graph.forward

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the model on a step's inputs."""
        args = self._args.copy()
        for slot, number in self._inputs:
            args[slot] = inputs[number]
        for slot, number, dim in self._sizes:
            args[slot] = inputs[number].shape[dim]
        return self._run(*args)


def _given(program: Program) -> list[Value]:
    """Returns the values that no part makes, each once, in the order of their first use."""
    values = [value for part in program.parts for value in part.values]
    return list(dict.fromkeys(v for v in [*values, program.result] if not isinstance(v, Output)))


def _call_graph(program: Program, given: Sequence[Value]) -> GraphModule:
    """Returns a graph that takes the given values and calls the parts."""
    graph = Graph()
    nodes: dict[Value, Node] = {
        value: graph.placeholder(_placeholder_name(number, value))
        for number, value in enumerate(given)
    }

    def node_of(value: Value) -> Node:
        if value not in nodes:
            assert isinstance(value, Output), "all others are given"
            whole = nodes[Output(value.part, None)]
            nodes[value] = graph.call_function(getitem, (whole, value.index))
        return nodes[value]

    for number, part in enumerate(program.parts):
        args = tuple(node_of(value) for value in part.values)
        nodes[Output(number, None)] = graph.call_module(part.item.submod_name, args)
    graph.output(node_of(program.result))
    return GraphModule({part.item.submod_name: part.item.graph for part in program.parts}, graph)


def _placeholder_name(number: int, value: Value) -> str:
    match value:
        case LayerWeight(layer, name):
            return f"layer_{layer}_{name.replace('.', '_')}"
        case Input(which):
            return f"input_{which}"
        case InputSize(which, dim):
            return f"size_{which}_{dim}"
        case _:
            return f"weight_{number}"


class AdapterForward:
    """Runs the program without adapters in steps that have none."""

    def __init__(self, adapted: Callable[..., Any], adapter_free: Callable[..., Any]) -> None:
        self._adapted = adapted
        self._adapter_free = adapter_free

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the model on a step's inputs, within its forward context."""
        has_adapters = get_forward_context().adapter_slots is not None
        return (self._adapted if has_adapters else self._adapter_free)(*inputs)


class RangedForward:
    """Runs the program of the range that a step's number of tokens is in."""

    def __init__(self, forwards: Sequence[tuple[int, Callable[..., Any]]]) -> None:
        """Takes the last number of tokens of each range, ascending, and its forward pass."""
        self._lasts = [last for last, _ in forwards]
        self._forwards = [forward for _, forward in forwards]

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the model on a step's inputs, whose first dimension is the number of tokens."""
        number = bisect_left(self._lasts, inputs[0].shape[0])
        return self._forwards[min(number, len(self._forwards) - 1)](*inputs)
