"""The test of a graph compares everything that it computes: fractions and chosen tokens."""

import pytest
import torch

from services.engine.compilation.graphs.capture_plan import full_decode_key
from services.engine.compilation.graphs.graph_runner import GraphRunner
from services.engine.compilation.graphs.replay_recorder import ReplayRecorder
from tests.support.graph_captures import completed

KEY = full_decode_key(2)
LOGITS = torch.tensor([[[0.0, 2.0, 1.0], [5.0, 1.0, 1.0]], [[3.0, 2.0, 1.0], [0.0, 1.0, 9.0]]])


class Captured:
    """A graph of a program over logits [2, 3], recorded with one content and tested with another.

    stale: the tokens are a constant of the capture. wrong: they are other than the most likely.
    """

    def __init__(self, *, stale=False, wrong=False, rounding=0.0, implied=None):
        logits = LOGITS[0].clone()
        runner = GraphRunner(ReplayRecorder())
        num_runs = 0

        def program():
            nonlocal num_runs
            num_runs += 1
            computed = logits * (1.0 + rounding * num_runs)
            tokens = computed.argmax(dim=-1)
            if stale:
                # Copied by the host, so a replay does not see where it came from.
                tokens = torch.tensor(logits.numpy().argmax(axis=-1)) + torch.zeros(2).long()
            if wrong:
                tokens = (tokens + num_runs) % 3
            return computed, tokens.int()

        capture = runner.capture(
            KEY,
            program,
            {"logits": logits},
            lambda variant: logits.copy_(LOGITS[variant]),
            implied=implied,
        )
        self.fault = completed(capture).fault
        self.is_kept = KEY in runner


def of_logits(outputs):
    return [outputs[0].argmax(dim=-1).int()]


@pytest.mark.parametrize("implied", [None, of_logits])
def test_an_honest_graph_passes(implied):
    captured = Captured(implied=implied)
    assert (captured.fault, captured.is_kept) == ("", True)
    assert Captured(implied=of_logits, rounding=1e-6).fault == ""


@pytest.mark.parametrize("implied", [None, of_logits])
@pytest.mark.parametrize("plant", ["stale", "wrong"])
def test_tokens_that_are_not_those_of_the_logits_are_a_fault(implied, plant):
    captured = Captured(implied=implied, **{plant: True})
    assert "2 of the integers that it computes are wrong" in captured.fault
    assert not captured.is_kept
