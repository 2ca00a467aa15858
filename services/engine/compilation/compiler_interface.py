"""The interface of compilers of pieces, and a compiler that runs graphs as traced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.fx import GraphModule

Runnable = Callable[..., Sequence[Any]]
"""A compiled piece: takes the graph's inputs in order and returns its outputs as a sequence."""


class CompilerInterface(Protocol):
    """Turns graphs into something that runs, and bytes back into it."""

    name: str
    """Part of the key of what it compiled."""

    def compute_hash(self) -> str:
        """Returns a digest of everything that shapes this compiler's output beside its inputs."""

    def compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        runtime_shape: int | None = None,
    ) -> tuple[Runnable, bytes | None]:
        """Compiles a graph whose output is a tuple.

        Args:
            graph: left as it is.
            example_inputs: one for each placeholder: fake tensors and symbolic integers for the
                general shape, real ones for one shape.
            compiler_config: settings of the compiler, by name.
            runtime_shape: the number of tokens to compile for; None for any.

        Returns:
            The compiled piece and its form on disk, or None if it has none.
        """

    def load(self, handle: bytes) -> Runnable:
        """Makes a compiled piece from its form on disk.

        Raises:
            LoadError: the bytes do not fit this process.
        """


class LoadError(Exception):
    """A compiled piece from disk cannot be used here."""


class EagerAdaptor:
    """Runs graphs as they were traced."""

    name = "eager"

    def compute_hash(self) -> str:
        """Returns the same digest always: nothing is compiled."""
        return "eager"

    def compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        runtime_shape: int | None = None,
    ) -> tuple[Runnable, bytes | None]:
        """Returns the graph's own code."""
        return graph.forward, None

    def load(self, handle: bytes) -> Runnable:
        """Raises LoadError: there is nothing to load."""
        raise LoadError(f"the eager compiler made no artifact of {len(handle)} bytes")
