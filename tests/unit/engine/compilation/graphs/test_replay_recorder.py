"""The CPU recorder repeats operations on the same memory, and nothing else."""

import pytest
import torch

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphRunner
from services.engine.compilation.graphs.recorder import FixedInputs, GraphFaultError
from services.engine.compilation.graphs.replay_recorder import ReplayRecorder
from tests.support.graph_captures import completed

KEY = GraphKey(kind=GraphKind.DECODE, num_tokens=3, graph_bs=3, max_q_len=1)


def record(program):
    with torch.inference_mode():
        return ReplayRecorder().record(program)


def replay(recording):
    with torch.inference_mode():
        recording.replay()


def test_a_replay_reads_new_content_and_writes_to_the_same_output():
    x = torch.tensor([1.0, 2.0, 3.0])
    recording = record(lambda: (x.view(3, 1) * 2).t().contiguous() + 1)
    address = recording.output.data_ptr()
    x.copy_(torch.tensor([4.0, 5.0, 6.0]))
    replay(recording)
    assert recording.output.tolist() == [[9.0, 11.0, 13.0]]
    assert recording.output.data_ptr() == address


def test_changes_in_place_and_into_given_tensors_are_repeated():
    x, total = torch.ones(2), torch.zeros(2)

    def program():
        torch.add(x, 1, out=total)
        return total[:1].mul_(3)

    recording = record(program)
    x.fill_(9.0)
    replay(recording)
    assert (recording.output.tolist(), total.tolist()) == ([30.0], [30.0, 10.0])


def test_python_code_and_numbers_stay_those_of_the_recording():
    x, factors = torch.ones(2), iter([2, 3])
    recording = record(lambda: x * next(factors))
    replay(recording)
    assert recording.output.tolist() == [2.0, 2.0]
    assert next(factors) == 3


def test_a_tensor_that_was_swapped_is_not_seen():
    inputs = {"x": torch.ones(2)}
    recording = record(lambda: inputs["x"] + 1)
    inputs["x"] = torch.full((2,), 5.0)
    replay(recording)
    assert recording.output.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "reads",
    [lambda x: x.sum().item(), lambda x: bool(x[0] > 0), torch.nonzero, lambda x: x[x > 0]],
)
def test_reading_a_tensors_content_is_refused(reads):
    x = torch.ones(2)
    with pytest.raises(GraphFaultError, match="reads a tensor's content"):
        record(lambda: (reads(x), x + 1)[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda inputs: inputs | {"x": inputs["x"].clone()}, "input x"),
        (lambda inputs: inputs | {"x": inputs["x"][:2]}, "input x"),
        (lambda inputs: inputs | {"x": inputs["x"].view(torch.int32)}, "input x"),
        (lambda inputs: inputs | {"y": inputs["x"]}, r"inputs \['y'\]"),
        (lambda inputs: {}, r"inputs \['x'\]"),
    ],
    ids=["moved", "another shape", "another dtype", "a new argument", "one less"],
)
def test_a_replay_with_other_inputs_than_those_captured_fails(change, named):
    inputs = {"x": torch.ones(3)}
    with torch.inference_mode():
        runner = GraphRunner(ReplayRecorder())
        capture = runner.capture(
            KEY, lambda: inputs["x"] * 2, inputs, lambda variant: inputs["x"].fill_(variant + 1)
        )
        outcome = completed(capture)
        assert outcome.fault == ""
        assert runner.replay(KEY, inputs).tolist() == [4.0] * 3
        with pytest.raises(GraphFaultError, match=named):
            runner.replay(KEY, change(inputs))


def test_fixed_inputs_accept_what_they_were_made_of():
    inputs = {"x": torch.ones(3), "y": torch.ones(2, 2).t()}
    FixedInputs(inputs).check(dict(inputs))


def test_a_graph_that_computes_something_else_is_not_kept():
    x, calls = torch.zeros(3), []

    def program():
        calls.append(None)
        return x + len(calls)

    with torch.inference_mode():
        runner = GraphRunner(ReplayRecorder())
        capture = runner.capture(KEY, program, {"x": x}, lambda variant: x.fill_(variant))
        outcome = completed(capture)
    assert "off by" in outcome.fault
    assert KEY not in runner


def test_an_output_that_is_not_a_number_is_a_fault():
    x = torch.zeros(3)
    with torch.inference_mode():
        runner = GraphRunner(ReplayRecorder())
        capture = runner.capture(KEY, lambda: x / x, {"x": x}, lambda variant: x.fill_(0.0))
        outcome = completed(capture)
    assert "off by nan" in outcome.fault
