"""Captures graphs, proves each of them once, and replays those that hold."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from models.forward_context import GraphKey
from services.engine.compilation.graphs.recorder import (
    FixedInputs,
    GraphFaultError,
    GraphRecorder,
    Inputs,
    Program,
    Recording,
)

log = structlog.get_logger()

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Error allowed by dtype, relative to the largest output, where kernels do not add up in the same
order twice. A graph that reads the wrong memory is off by about 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutcome:
    """What became of a graph; `fault` says why it must not be replayed.

    num_bytes: device memory that it added.
    """

    key: GraphKey
    capture_s: float = 0.0
    num_bytes: int = 0
    fault: str = ""


@dataclass(slots=True)
class _Graph:
    recording: Recording
    inputs: FixedInputs
    is_checked: bool = False


class GraphRunner:
    """The graphs of whole forward passes, by key.

    Programs return a tuple of tensors; those with fractions are what a graph is tested by.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._graphs: dict[GraphKey, _Graph] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self, key: GraphKey, program: Program, inputs: Inputs, rehearse: Callable[[int], None]
    ) -> GraphOutcome:
        """Captures a program and keeps the graph if it does what the program does.

        Args:
            key: names the graph.
            program: what to capture. Running it twice gives the same.
            inputs: what it reads and others write.
            rehearse: fills the inputs with content that may be computed with at any time; the
                graph is recorded with one content, 0, and tested with another, 1.
        """
        recorder = self._recorder
        started_s = time.monotonic()
        try:
            rehearse(1)
            expected = [output.clone() for output in _fractions(recorder.warm_up(program))]
            rehearse(0)
            recorder.synchronize()
            before = recorder.num_used_bytes()
            recording = recorder.record(program)
            graph = _Graph(recording.shared(), FixedInputs(inputs))
            del recording
            recorder.synchronize()
            num_bytes = max(0, recorder.num_used_bytes() - before)
            self._graphs[key] = graph
            rehearse(1)
            # The program may have written to the very same memory.
            for output in _fractions(graph.recording.output):
                output.fill_(torch.nan)
            outputs = _fractions(self.replay(key, inputs))
            for before_capture, replayed in zip(expected, outputs, strict=True):
                require_same(before_capture, replayed)
            graph.is_checked = False  # the first replay that serves is checked again
        except (GraphFaultError, torch.OutOfMemoryError) as error:
            self.drop(key)
            log.warning("graph_quarantined", graph=str(key), fault=str(error))
            return GraphOutcome(key=key, capture_s=time.monotonic() - started_s, fault=str(error))
        capture_s = time.monotonic() - started_s
        return GraphOutcome(key=key, capture_s=capture_s, num_bytes=num_bytes)

    def replay(self, key: GraphKey, inputs: Inputs) -> tuple[Tensor, ...]:
        """Runs a graph; the results are overwritten by the next replay of any graph.

        Raises:
            GraphFaultError: an input is not where it was at the capture.
        """
        graph = self._graphs[key]
        if not graph.is_checked or self._recorder.checks_every_replay:
            graph.inputs.check(inputs)
            graph.is_checked = True
        graph.recording.replay()
        output: tuple[Tensor, ...] = graph.recording.output
        return output

    def drop(self, key: GraphKey) -> None:
        """Forgets a graph, if there is one."""
        self._graphs.pop(key, None)


def _fractions(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the outputs that rounding may change a little; a token may change altogether."""
    return [output for output in outputs if output.is_floating_point()]


def require_same(expected: Tensor, actual: Tensor) -> None:
    """Raises GraphFaultError unless the two are equal, but for rounding."""
    if torch.equal(expected, actual):
        return
    scale = expected.abs().max().float()
    error = ((actual.float() - expected.float()).abs().max() / scale).item()
    if not error <= RELATIVE_TOLERANCE[expected.dtype]:  # a NaN is an error too
        raise GraphFaultError(f"its output is off by {error:.2g} of what the model computes")
