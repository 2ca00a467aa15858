"""Captures graphs, tests each once, and replays the graphs that pass."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
    is_provisional: a graph of the compiled model will replace it.
    """

    key: GraphKey
    capture_s: float = 0.0
    num_bytes: int = 0
    fault: str = ""
    is_provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured graph and the test of its outputs, under way on the device.

    num_bytes: device memory that it added. keep: lets replays run it, once it has passed.
    """

    test: Verdict
    num_bytes: int = 0
    keep: Callable[[], None] = lambda: None


Slices: TypeAlias = Generator[None, None, Captured]
"""Captures one graph; steps may run wherever it yields."""


class GraphCapture:
    """The capture of one graph, in slices: `advance` until it `is_under_test`, then `finish`."""

    def __init__(self, key: GraphKey, slices: Slices, *, drop: Callable[[GraphKey], None]) -> None:
        """Starts with nothing captured.

        Args:
            key: names the graph.
            slices: captures it.
            drop: removes the graph.
        """
        self.key = key
        self._slices = slices
        self._drop = drop
        self._capture_s = 0.0
        self._end: Captured | GraphFaultError | torch.OutOfMemoryError | None = None

    @property
    def is_under_test(self) -> bool:
        """Whether all slices have run; a graph that cannot be captured has failed its test."""
        return self._end is not None

    @property
    def is_decided(self) -> bool:
        """Whether `finish` does not wait for the device."""
        if isinstance(self._end, Captured):
            return self._end.test.is_ready
        return self.is_under_test

    def advance(self) -> None:
        """Runs the next slice."""
        started_s = time.monotonic()
        try:
            next(self._slices)
        except StopIteration as end:
            self._end = end.value
        except (GraphFaultError, torch.OutOfMemoryError) as error:
            self._end = error
        self._capture_s += time.monotonic() - started_s

    def finish(self, agree: Callable[[str], str] = str) -> GraphOutcome:
        """Waits for the test and keeps the graph if it passed.

        agree: maps the fault found here, or "", to the one that holds for all ranks.
        """
        started_s = time.monotonic()
        end, fault = self._end, ""
        assert end is not None, "all slices have run"
        if isinstance(end, Captured):
            try:
                end.test.require_same()
            except GraphFaultError as error:
                fault = str(error)
        else:
            fault = str(end)
        fault = agree(fault)
        if fault:
            self._drop(self.key)
        elif isinstance(end, Captured):
            end.keep()
        return GraphOutcome(
            key=self.key,
            capture_s=self._capture_s + time.monotonic() - started_s,
            num_bytes=end.num_bytes if isinstance(end, Captured) and not fault else 0,
            fault=fault,
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

    def capture(
        self,
        key: GraphKey,
        program: Program,
        inputs: Inputs,
        fill_inputs: Callable[[int], None],
        *,
        implied: Implied | None = None,
    ) -> GraphCapture:
        """Returns the capture of a program and its test; the graph serves only after that.

        An earlier graph of this key serves until then.

        Args:
            key: names the graph.
            program: the program; two runs give the same result.
            inputs: the tensors that it reads and others write.
            fill_inputs: fills the inputs with a content that can always be computed: 0 for the
                recording, 1 for the test.
            implied: computes the expected integers from a graph's outputs; by default they are the
                program's own, which rounding could change.
        """
        slices = self._capture(key, program, inputs, fill_inputs, implied)
        return GraphCapture(key, slices, drop=self.drop)

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
    ) -> Slices:
        recorder = self._recorder
        fill_inputs(1)
        with FusionCheck() as fusions:
            expected = [output.clone() for output in recorder.warm_up(program)]
        yield
        fill_inputs(0)
        before = recorder.num_used_bytes()
        recording = recorder.record(program)
        graph = _Graph(recording.shared(), FixedInputs(inputs))
        del recording
        num_bytes = max(0, recorder.num_used_bytes() - before)
        yield
        fill_inputs(1)
        # The program may have written to the very same memory.
        for output in graph.recording.output:
            output.fill_(torch.nan if output.is_floating_point() else UNWRITTEN)
        graph.inputs.check(inputs)
        graph.recording.replay()
        actual: tuple[Tensor, ...] = graph.recording.output
        if implied is not None:
            integers = iter(implied(actual))
            expected = [
                output if output.is_floating_point() else next(integers) for output in expected
            ]
        return Captured(
            test=Verdict(expected, actual, fusions.comparisons),
            num_bytes=num_bytes,
            keep=lambda: self._graphs.update({key: graph}),
        )
