"""The interface of piece compilers, and a compiler that runs graphs as traced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule

from models.ops.custom_op import direct_call

Runnable = Callable[..., Sequence[Any]]
"""A compiled piece: takes the graph's inputs in order and returns its outputs as a sequence."""


class CompilerInterface(Protocol):
    """Compiles graphs and loads compiled ones."""

    name: str
    """Part of the key of its artifacts."""

    def compute_hash(self) -> str:
        """Returns a digest of all that affects this compiler's output besides its inputs."""

    def compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        runtime_shape: int | None = None,
    ) -> tuple[Runnable, bytes | None]:
        """Compiles a graph whose output is a tuple.

        Args:
            graph: not changed.
            example_inputs: one per placeholder: fake tensors and symbolic integers for the general
                shape, real ones for one shape.
            compiler_config: settings of the compiler, by name.
            runtime_shape: the number of tokens to compile for; None for any.

        Returns:
            The compiled piece and its form on disk, if it has one.
        """

    def load(self, handle: bytes) -> Runnable:
        """Loads a compiled piece from its form on disk.

        Raises:
            LoadError: the bytes do not fit this process.
        """


class LoadError(Exception):
    """A compiled piece from disk cannot be used here."""


class EagerAdaptor:
    """Runs graphs as they were traced."""

    name = "eager"

    def compute_hash(self) -> str:
        """Returns a constant digest."""
        return "eager"

    def compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        runtime_shape: int | None = None,
    ) -> tuple[Runnable, bytes | None]:
        """Returns the graph's own code."""
        return with_direct_calls(graph).forward, None

    def load(self, handle: bytes) -> Runnable:
        """Raises LoadError: it stores nothing."""
        raise LoadError(f"the eager compiler made no artifact of {len(handle)} bytes")


def with_direct_calls(graph: GraphModule) -> GraphModule:
    """Returns a copy of a graph whose calls of our operators skip torch's dispatcher."""
    copied = Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    for node in copied.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = target.default
        call = direct_call(target)
        if call is not None:
            assert not node.kwargs, "our operators are called with positional arguments"
            node.target = call
    return GraphModule(graph, copied)
