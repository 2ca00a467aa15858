"""The interface of the graphs of one kind."""

from typing import Protocol

from torch import Tensor

from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphCapture
from services.engine.worker.inputs.batch import Batch


class GraphFamily(Protocol):
    """The graphs of one kind."""

    def capture(self, key: GraphKey) -> GraphCapture:
        """Returns the capture of one graph and its test, in slices between steps."""

    def replay(self, key: GraphKey, batch: Batch | None) -> tuple[Tensor, ...]:
        """Runs a captured graph over a batch whose header was written, or without one the encoder.

        Returns:
            Outputs at the graph's size, valid until the next replay.

        Raises:
            GraphFaultError: the graph would read the wrong memory; the step may run again.
        """

    def warm_up(self, key: GraphKey) -> None:
        """Runs the program once over dummy requests, without a graph."""

    def drop(self, key: GraphKey) -> None:
        """Removes a graph."""
