"""A graph's outputs may differ from those expected by rounding, and by nothing else."""

import pytest
import torch

from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.compilation.graphs.verdict import RELATIVE_TOLERANCE, Verdict

X = torch.tensor([[1.0, -8.0], [0.5, 2.0]])


def test_equal_outputs_pass_whatever_they_are():
    infinite = torch.tensor([torch.inf, 1.0, -torch.inf])
    for outputs in ([X], [X, X.bfloat16()], [torch.zeros(3)], [infinite]):
        Verdict(outputs, [output.clone() for output in outputs]).require_same()


@pytest.mark.parametrize("dtype", RELATIVE_TOLERANCE)
def test_rounding_passes_and_more_does_not(dtype):
    expected = X.to(dtype)
    for share, is_fault in ((0.5, False), (2.0, True)):
        actual = (X + 8 * share * RELATIVE_TOLERANCE[dtype]).to(dtype)
        verdict = Verdict([expected], [actual])
        if is_fault:
            with pytest.raises(GraphFaultError, match="off by"):
                verdict.require_same()
        else:
            verdict.require_same()


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (X, torch.full_like(X, torch.nan)),
        (torch.full_like(X, torch.nan), torch.full_like(X, torch.nan)),
        (X, X + torch.tensor([0.0, torch.inf])),
        (torch.zeros(2), torch.tensor([0.0, 1e-20])),
    ],
)
def test_what_is_not_a_number_or_comes_from_nothing_is_a_fault(expected, actual):
    with pytest.raises(GraphFaultError):
        Verdict([expected], [actual]).require_same()


def test_one_wrong_output_of_several_is_a_fault():
    with pytest.raises(GraphFaultError):
        Verdict([X, X], [X, X + 1]).require_same()


def test_an_integer_that_differs_is_a_fault_however_close():
    tokens = torch.tensor([5, 2**30, -1], dtype=torch.int32)
    Verdict([X, tokens], [X, tokens.clone()]).require_same()
    with pytest.raises(GraphFaultError, match="1 of the integers"):
        Verdict([X, tokens], [X, tokens + torch.tensor([0, 1, 0])]).require_same()


def test_outputs_may_be_overwritten_before_the_verdict_is_read():
    expected, actual = X.clone(), X.clone()
    verdict = Verdict([expected], [actual])
    actual.zero_()
    verdict.require_same()
