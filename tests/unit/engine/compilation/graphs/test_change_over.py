"""Graphs of the model before it is compiled, and the change to those of the compiled one."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from services.engine.batch import FallbackReason
from services.engine.worker.start.graph_setup import graph_report
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]
NUM_OUTPUT = 9
RAN_GRAPH = FallbackReason.FALLBACK_REASON_UNSPECIFIED


class Engine:
    """An engine whose model is compiled, but runs as it is written until `change_over`."""

    def __init__(self, folder, *, are_provisional=True):
        config = compilation_config(
            level=3,
            use_inductor=False,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=(1, 2, 4, 8),
            cudagraph_piece_sizes=(16,),
        )
        self.engine = GraphEngine(folder, config)
        self.graphs = self.engine.prepared.graphs
        self.forward = self.engine.runner.forward
        self.compiled, self.forward.run_model = self.forward.run_model, self.engine.model
        self.graphs.begin_early(are_provisional=are_provisional)

    def capture(self):
        """Captures all that is due; returns the requests of each graph."""
        sizes = []
        while self.graphs.has_next:
            outcome = self.graphs.capture_slice()
            if outcome is not None:
                assert not outcome.fault
                sizes.append((outcome.key.kind, outcome.key.graph_bs, outcome.is_provisional))
                self.engine.ledger.take(graph_report(outcome))
        return sizes

    def change_over(self):
        self.graphs.end_early()
        self.forward.run_model = self.compiled

    def run(self):
        """Generates; returns the tokens and the number of decode steps with a graph."""
        self.engine.reasons.clear()
        tokens = self.engine.run(PROMPTS, NUM_OUTPUT)
        return tokens, self.engine.reasons.count(RAN_GRAPH)


@pytest.fixture(scope="module")
def expected(folder):
    return GraphEngine(folder, compilation_config()).run(PROMPTS, NUM_OUTPUT)


def test_tokens_are_the_same_before_between_and_after(folder, expected):
    engine = Engine(folder)
    assert engine.capture() == []
    assert engine.run() == (expected, 0)
    # Three requests ran, so the graph with room for four is the one that steps missed.
    assert engine.capture() == [(GraphKind.DECODE, 4, True)]
    tokens, num_replays = engine.run()
    assert tokens == expected
    assert num_replays >= NUM_OUTPUT - 2
    assert engine.engine.ledger.figures == []
    engine.change_over()
    # It serves until a graph of the compiled model has passed its test.
    assert engine.run() == (expected, num_replays)
    captured = engine.capture()
    assert captured[0] == (GraphKind.DECODE, 4, False)
    assert {size for kind, size, _ in captured if kind is GraphKind.DECODE} == {1, 2, 4, 8}
    assert not any(is_provisional for *_, is_provisional in captured)
    tokens, num_after = engine.run()
    assert tokens == expected
    assert num_after > num_replays
    figures = {each.key.num_tokens: each for each in engine.engine.ledger.figures}
    assert len(figures) == len(engine.graphs.planned)
    assert figures[4].num_replays >= 3 * num_replays


def test_a_graph_is_replaced_once_its_successor_has_passed(folder, expected):
    engine = Engine(folder)
    engine.run()
    engine.capture()
    (key,) = [key for key in engine.graphs.planned if engine.graphs.is_captured(key)]
    family = engine.graphs._families[key.kind]._graphs
    provisional = family._graphs[key]
    engine.change_over()
    while engine.graphs.capture_slice() is None:
        assert family._graphs == {key: provisional}
        assert engine.run()[0] == expected
    assert family._graphs[key] is not provisional
    assert len(family) == 1


def test_a_capture_of_the_old_model_that_is_under_way_is_begun_again(folder, expected):
    engine = Engine(folder)
    engine.run()
    engine.graphs.capture_slice()
    engine.change_over()
    assert engine.graphs.num_pending == len(engine.graphs.planned)
    assert engine.capture()[0] == (GraphKind.DECODE, 4, False)
    assert engine.run()[0] == expected


def test_a_fault_of_a_provisional_graph_is_none_of_its_successor(folder, expected):
    engine = Engine(folder)
    engine.run()
    outputs = iter(torch.arange(10.0))
    model = engine.engine.model
    engine.forward.run_model = lambda *inputs: model(*inputs) * (1 + next(outputs))
    assert engine.capture() == []
    engine.forward.run_model = model
    assert engine.run() == (expected, 0)
    engine.change_over()
    assert engine.capture()[0] == (GraphKind.DECODE, 4, False)
    assert engine.run()[0] == expected


def test_graphs_of_a_model_that_stays_are_captured_once(folder, expected):
    engine = Engine(folder, are_provisional=False)
    engine.run()
    assert engine.capture() == [(GraphKind.DECODE, 4, False)]
    engine.change_over()
    captured = engine.capture()
    assert (GraphKind.DECODE, 4, False) not in captured
    assert len(captured) == len(engine.graphs.planned) - 1
    assert engine.run()[0] == expected
