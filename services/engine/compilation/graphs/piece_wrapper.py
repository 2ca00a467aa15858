"""Captures the pieces of a model between its attention layers.

Each piece of a compiled model becomes one graph. A model that is not compiled in pieces is captured
as it runs: the capture ends before each attention layer and resumes after it ("breakable" capture).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey, get_forward_context
from services.engine.compilation.graphs.recorder import (
    FixedInputs,
    GraphFaultError,
    GraphRecorder,
    Recording,
)
from services.engine.compilation.program.piece_info import PieceInfo

Piece = Callable[..., Any]


@dataclass(slots=True)
class _PieceGraph:
    recording: Recording
    inputs: FixedInputs
    is_checked: bool = False


class CUDAGraphWrapper:
    """Runs, captures or replays one piece, as the forward context says.

    In mode PIECEWISE, batch_descriptor names the graph. In any other mode the piece runs, possibly
    inside the capture of a whole forward pass.
    """

    def __init__(
        self, piece: Piece, name: str, graphs: "PieceGraphs", *, around: Collection[str] = ()
    ) -> None:
        """Starts without graphs.

        Args:
            piece: the wrapped piece.
            name: its name in errors.
            graphs: the pieces of the same model.
            around: operators that the piece calls outside graphs.
        """
        self._piece = piece
        self._name = name
        self._owner = graphs
        self._around = around
        self._graphs: dict[GraphKey, _PieceGraph] = {}

    def __call__(self, *args: Any) -> Any:
        """Returns the piece's result; other replays overwrite that of a replay.

        Raises:
            GraphFaultError: an argument has moved since the capture, or there is no graph.
        """
        context = get_forward_context()
        key = context.batch_descriptor
        if context.cudagraph_runtime_mode is not CUDAGraphMode.PIECEWISE or key is None:
            return self._piece(*args)
        graph = self._graphs.get(key)
        if graph is None:
            return self._capture(key, args)
        if not graph.is_checked or self._owner.recorder.checks_every_replay:
            graph.inputs.check(_tensors(args))
            graph.is_checked = True
        graph.recording.replay()
        return graph.recording.output

    def belong_to(self, graphs: "PieceGraphs") -> None:
        """Makes this piece one of `graphs`."""
        self._owner = graphs

    def drop(self, key: GraphKey) -> None:
        """Removes a graph, if present."""
        self._graphs.pop(key, None)

    def check_again(self, key: GraphKey) -> None:
        """Makes the next replay of a graph, if present, compare its arguments with the capture's.

        Other numbers of tokens, and steps without adapters, run other pieces.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.is_checked = False

    def _capture(self, key: GraphKey, args: tuple[Any, ...]) -> Any:
        if not self._owner.is_capturing:
            raise GraphFaultError(f"{self._name} was not captured for {key}")
        recorder = self._owner.recorder
        if self._around:
            recording = recorder.record_around(lambda: self._piece(*args), self._around)
        else:
            recording = recorder.record(lambda: self._piece(*args))
            # A capture computes nothing, and the next piece needs the result.
            recording.replay()
        self._graphs[key] = _PieceGraph(recording.shared(), FixedInputs(_tensors(args)))
        return recording.output


class PieceGraphs:
    """All pieces of one model, and whether they are being captured."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder
        self.is_capturing = False
        self._wrappers: list[CUDAGraphWrapper] = []

    def __len__(self) -> int:
        return len(self._wrappers)

    def wrap(self, piece: Piece, info: PieceInfo) -> CUDAGraphWrapper:
        """Wraps a piece; a compiler's PieceWrapper."""
        return self._add(CUDAGraphWrapper(piece, f"piece {info.name}", self))

    def wrap_model(self, forward: Piece, around: Collection[str]) -> CUDAGraphWrapper:
        """Wraps a whole forward pass, to be captured around some operators.

        It replaces all pieces wrapped before.

        Args:
            forward: a model's forward pass.
            around: operators to keep out of graphs, as namespace::name.
        """
        self._wrappers.clear()
        return self._add(CUDAGraphWrapper(forward, "the model", self, around=around))

    def adopt(self, others: "PieceGraphs") -> None:
        """Takes the wrappers of another set in place of its own, whose graphs are gone."""
        self._wrappers = others._wrappers
        for wrapper in self._wrappers:
            wrapper.belong_to(self)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Lets forward passes in the block capture missing graphs."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def check_again(self, key: GraphKey) -> None:
        """Makes the next replay compare all arguments with the capture's."""
        for wrapper in self._wrappers:
            wrapper.check_again(key)

    def drop(self, key: GraphKey) -> None:
        """Removes the graphs of a key."""
        for wrapper in self._wrappers:
            wrapper.drop(key)

    def _add(self, wrapper: CUDAGraphWrapper) -> CUDAGraphWrapper:
        self._wrappers.append(wrapper)
        return wrapper


def _tensors(args: tuple[Any, ...]) -> dict[str, Tensor]:
    return {f"{index}": arg for index, arg in enumerate(args) if isinstance(arg, Tensor)}
