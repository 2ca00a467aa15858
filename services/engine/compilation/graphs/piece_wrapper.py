"""Captures the pieces of a model between its attention layers.

A compiled model brings its pieces, each of which becomes one graph here. A model that is not
compiled in pieces is captured as it runs: a capture ends where an attention layer begins, and the
next one begins after it ("breakable" capture).
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
from services.engine.compilation.piece_info import PieceInfo

Piece = Callable[..., Any]


@dataclass(slots=True)
class _PieceGraph:
    recording: Recording
    inputs: FixedInputs
    is_checked: bool = False


class CUDAGraphWrapper:
    """Stands in for one piece: runs it, captures it or replays it, as the forward context says.

    In a pass in mode PIECEWISE, batch_descriptor names the graph; in any other the piece runs, and
    may well become part of the graph of a whole forward pass.
    """

    def __init__(
        self, piece: Piece, name: str, graphs: "PieceGraphs", *, around: Collection[str] = ()
    ) -> None:
        """Starts without graphs.

        Args:
            piece: what to run.
            name: what errors call it.
            graphs: the pieces of the same model.
            around: operators that the piece calls and that must not be in a graph.
        """
        self._piece = piece
        self._name = name
        self._owner = graphs
        self._around = around
        self._graphs: dict[GraphKey, _PieceGraph] = {}

    def __call__(self, *args: Any) -> Any:
        """Returns what the piece returns; a replay's result is overwritten by other replays.

        Raises:
            GraphFaultError: an argument is not where it was at the capture, or there is no graph.
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

    def drop(self, key: GraphKey) -> None:
        """Forgets a graph, if there is one."""
        self._graphs.pop(key, None)

    def check_again(self, key: GraphKey) -> None:
        """Has the next replay of a graph compare its arguments with those of the capture."""
        self._graphs[key].is_checked = False

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
        """Puts a wrapper around a piece; a compiler's PieceWrapper."""
        return self._add(CUDAGraphWrapper(piece, f"piece {info.name}", self))

    def wrap_model(self, forward: Piece, around: Collection[str]) -> CUDAGraphWrapper:
        """Puts one wrapper around a whole forward pass, to be captured around some operators.

        It represents all pieces: pieces that were wrapped before are forgotten.

        Args:
            forward: a model's, which calls them.
            around: operators that must not be in a graph, as namespace::name.
        """
        self._wrappers.clear()
        return self._add(CUDAGraphWrapper(forward, "the model", self, around=around))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Lets forward passes inside the block capture what they do not find."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def check_again(self, key: GraphKey) -> None:
        """Has the next replay compare all arguments with those of the capture."""
        for wrapper in self._wrappers:
            wrapper.check_again(key)

    def drop(self, key: GraphKey) -> None:
        """Forgets the graphs of one key."""
        for wrapper in self._wrappers:
            wrapper.drop(key)

    def _add(self, wrapper: CUDAGraphWrapper) -> CUDAGraphWrapper:
        self._wrappers.append(wrapper)
        return wrapper


def _tensors(args: tuple[Any, ...]) -> dict[str, Tensor]:
    return {f"{index}": arg for index, arg in enumerate(args) if isinstance(arg, Tensor)}
