"""Steps are counted by kind and size."""

from collections import Counter

from models.cudagraph_mode import CUDAGraphMode
from protos.engine.v1.batch_pb2 import Context
from services.engine.capture_sizes.histogram import StepHistogram


def context(num_tokens, batch_size):
    return Context(num_tokens=num_tokens, batch_size=batch_size)


def test_a_step_of_one_token_each_counts_by_requests_and_any_other_by_tokens():
    histogram = StepHistogram()
    for step in (context(3, 3), context(3, 3), context(1, 1), context(40, 3), context(3, 2)):
        histogram.count(step)
    assert histogram.decodes == {3: 2, 1: 1}
    assert histogram.others == {40: 1, 3: 1}
    assert histogram.num_steps == 5


def test_what_each_kind_of_graph_is_for_depends_on_the_mode():
    histogram = StepHistogram(Counter({2: 5}), Counter({9: 1}))
    kinds = {mode: histogram.by_graph_kind(mode) for mode in CUDAGraphMode}
    assert kinds[CUDAGraphMode.FULL_AND_PIECEWISE] == ({2: 5}, {9: 1})
    assert kinds[CUDAGraphMode.FULL] == ({2: 5}, {9: 1})
    assert kinds[CUDAGraphMode.FULL_DECODE_ONLY] == ({2: 5}, {})
    assert kinds[CUDAGraphMode.PIECEWISE] == ({}, {2: 5, 9: 1})
    assert kinds[CUDAGraphMode.NONE] == ({}, {})


def test_histograms_add_and_subtract_and_halve():
    one = StepHistogram(Counter({1: 3, 2: 1}), Counter({9: 5}))
    two = StepHistogram(Counter({1: 1}), Counter({9: 5, 8: 1}))
    assert one + two == StepHistogram(Counter({1: 4, 2: 1}), Counter({9: 10, 8: 1}))
    assert (one + two) - two == one
    assert one.halved() == StepHistogram(Counter({1: 1}), Counter({9: 2}))
