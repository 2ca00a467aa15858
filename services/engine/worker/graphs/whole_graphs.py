"""Graphs of whole programs, from the step's header to its outputs."""

from typing import Protocol

from torch import Tensor

from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphCapture, GraphRunner, Implied
from services.engine.compilation.graphs.recorder import GraphRecorder, Inputs, Program
from services.engine.worker.inputs.batch import Batch


class GraphProgram(Protocol):
    """The program of one kind of graph."""

    @property
    def implied(self) -> Implied | None:
        """Computes the integer outputs from the others; None if they must equal the program's."""

    def inputs(self, key: GraphKey) -> Inputs:
        """Returns the tensors at fixed addresses that a graph reads and others write."""

    def program(self, key: GraphKey) -> Program:
        """Returns the program to capture, which returns a tuple of tensors."""

    def write_dummy(self, key: GraphKey, variant: int) -> None:
        """Fills the inputs with one of two contents that can always be computed."""


class WholeGraphs:
    """Captures and replays the graphs of one program.

    A graph gathers its tokens from the tables, so a step needs one copy, of its header, and one
    replay. Its attention is planned for the longest sequence.
    """

    def __init__(self, program: GraphProgram, recorder: GraphRecorder) -> None:
        self._program = program
        self._graphs = GraphRunner(recorder)

    def capture(self, key: GraphKey) -> GraphCapture:
        """Returns the capture of one graph and its test; live blocks are not changed."""
        return self._graphs.capture(
            key,
            self._program.program(key),
            self._program.inputs(key),
            lambda variant: self._program.write_dummy(key, variant),
            implied=self._program.implied,
        )

    def replay(self, key: GraphKey, batch: Batch | None) -> tuple[Tensor, ...]:
        """Runs the graph over the inputs that were written.

        Returns:
            The program's outputs at the graph's size, valid until the next replay.

        Raises:
            GraphFaultError: the graph would read the wrong memory; nothing was computed.
        """
        return self._graphs.replay(key, self._program.inputs(key))

    def warm_up(self, key: GraphKey) -> None:
        """Runs the program without a graph, which builds its kernels."""
        self._program.write_dummy(key, 0)
        self._program.program(key)()

    def drop(self, key: GraphKey) -> None:
        """Removes a graph."""
        self._graphs.drop(key)
