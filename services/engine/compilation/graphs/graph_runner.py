"""Captures graphs, tests each once, and replays the graphs that pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.forward_context import GraphKey
from services.engine.compilation.graphs.fusion_check import FusionCheck
from services.engine.compilation.graphs.recorder import (
    FixedInputs,
    GraphFaultError,
    GraphRecorder,
    Inputs,
    Program,
    Recording,
)
from services.engine.compilation.graphs.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutcome:
    """The end of a graph's capture; `fault` says why it must not be replayed.

    num_bytes: device memory that it added.
    """

    key: GraphKey
    capture_s: float = 0.0
    num_bytes: int = 0
    fault: str = ""


class StartedCapture:
    """A captured graph under test on the device."""

    def __init__(
        self,
        key: GraphKey,
        *,
        capture_s: float,
        num_bytes: int = 0,
        test: Verdict | GraphFaultError | torch.OutOfMemoryError,
        drop: Callable[[GraphKey], None],
    ) -> None:
        """Starts with a graph under test.

        Args:
            key: names it.
            capture_s: time spent so far.
            num_bytes: device memory that it added.
            test: of its outputs, or the error of the capture.
            drop: removes the graph.
        """
        self.key = key
        self._capture_s = capture_s
        self._num_bytes = num_bytes
        self._test = test
        self._drop = drop

    def finish(self, agree: Callable[[str], str] = str) -> GraphOutcome:
        """Waits for the test and drops the graph if it failed.

        agree: maps the fault found here, or "", to the one that holds for all ranks.
        """
        started_s = time.monotonic()
        fault = "" if isinstance(self._test, Verdict) else str(self._test)
        if isinstance(self._test, Verdict):
            try:
                self._test.require_same()
            except GraphFaultError as error:
                fault = str(error)
        fault = agree(fault)
        if fault:
            self._drop(self.key)
        return GraphOutcome(
            key=self.key,
            capture_s=self._capture_s + time.monotonic() - started_s,
            num_bytes=0 if fault else self._num_bytes,
            fault=fault,
        )


def start_capture(
    key: GraphKey,
    capture: Callable[[], tuple[int, Verdict]],
    *,
    drop: Callable[[GraphKey], None],
) -> StartedCapture:
    """Captures a graph.

    Args:
        key: names it.
        capture: captures it; returns the bytes it added and the test of its outputs.
        drop: removes the graph.
    """
    started_s = time.monotonic()
    test: Verdict | GraphFaultError | torch.OutOfMemoryError
    num_bytes = 0
    try:
        num_bytes, test = capture()
    except (GraphFaultError, torch.OutOfMemoryError) as error:
        test = error
    return StartedCapture(
        key,
        capture_s=time.monotonic() - started_s,
        num_bytes=num_bytes,
        test=test,
        drop=drop,
    )


Implied = Callable[[tuple[Tensor, ...]], Sequence[Tensor]]
"""Computes the integer outputs from a graph's outputs, without the graph."""

UNWRITTEN = -(2**30)
"""Fills integer outputs before the test of a graph; no program computes it."""


@dataclass(slots=True)
class _Graph:
    recording: Recording
    inputs: FixedInputs
    is_checked: bool = False


class GraphRunner:
    """The graphs of whole forward passes, by key.

    Programs return a tuple of tensors; a graph's test compares all of them.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._graphs: dict[GraphKey, _Graph] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def start(
        self,
        key: GraphKey,
        program: Program,
        inputs: Inputs,
        fill_inputs: Callable[[int], None],
        *,
        implied: Implied | None = None,
    ) -> StartedCapture:
        """Captures a program and starts the graph's test; it serves only after that.

        Args:
            key: names the graph.
            program: the program; two runs give the same result.
            inputs: the tensors that it reads and others write.
            fill_inputs: fills the inputs with a content that can always be computed: 0 for the
                recording, 1 for the test.
            implied: computes the expected integers from a graph's outputs; by default they are the
                program's own, which rounding could change.
        """
        return start_capture(
            key, lambda: self._capture(key, program, inputs, fill_inputs, implied), drop=self.drop
        )

    def replay(self, key: GraphKey, inputs: Inputs) -> tuple[Tensor, ...]:
        """Runs a graph; the next replay of any graph overwrites the results.

        Raises:
            GraphFaultError: an input has moved since the capture.
        """
        graph = self._graphs[key]
        if not graph.is_checked or self._recorder.checks_every_replay:
            graph.inputs.check(inputs)
            graph.is_checked = True
        graph.recording.replay()
        output: tuple[Tensor, ...] = graph.recording.output
        return output

    def drop(self, key: GraphKey) -> None:
        """Removes a graph, if present."""
        self._graphs.pop(key, None)

    def _capture(
        self,
        key: GraphKey,
        program: Program,
        inputs: Inputs,
        fill_inputs: Callable[[int], None],
        implied: Implied | None,
    ) -> tuple[int, Verdict]:
        recorder = self._recorder
        fill_inputs(1)
        with FusionCheck() as fusions:
            expected = [output.clone() for output in recorder.warm_up(program)]
        fill_inputs(0)
        before = recorder.num_used_bytes()
        recording = recorder.record(program)
        graph = _Graph(recording.shared(), FixedInputs(inputs))
        del recording
        num_bytes = max(0, recorder.num_used_bytes() - before)
        self._graphs[key] = graph
        fill_inputs(1)
        # The program may have written to the very same memory.
        for output in graph.recording.output:
            output.fill_(torch.nan if output.is_floating_point() else UNWRITTEN)
        actual = self.replay(key, inputs)
        if implied is not None:
            integers = iter(implied(actual))
            expected = [
                output if output.is_floating_point() else next(integers) for output in expected
            ]
        verdict = Verdict(expected, actual, fusions.comparisons)
        graph.is_checked = False  # the first replay that serves is checked again
        return num_bytes, verdict
