"""One replay for graphs of every kind."""

from dataclasses import replace

import pytest
import torch

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import Captured, GraphCapture
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.compilation.graphs.verdict import Verdict
from services.engine.worker.graphs.graph_set import GraphSet
from services.engine.worker.inputs.dummy_steps import dummy_batch


class FakeFamily:
    """Captures and replays nothing, and notes its calls."""

    def __init__(self):
        self.calls = []
        self.fault = None

    def capture(self, key):
        def slices():
            yield
            yield
            one = torch.ones(1)
            return Captured(test=Verdict([one], [one]))

        return GraphCapture(key, slices(), drop=self.drop)

    def replay(self, key, batch):
        if self.fault:
            raise GraphFaultError(self.fault)
        self.calls.append(("replay", key))
        return (torch.zeros(key.num_tokens),)

    def warm_up(self, key):
        self.calls.append(("warm_up", key))

    def drop(self, key):
        self.calls.append(("drop", key))


def graph_key(kind, num_tokens, graph_bs, max_q_len):
    return GraphKey(kind=kind, num_tokens=num_tokens, graph_bs=graph_bs, max_q_len=max_q_len)


KEYS = (
    graph_key(GraphKind.DECODE, 8, 4, 2),
    graph_key(GraphKind.DRAFT, 8, 4, 2),
    graph_key(GraphKind.MIXED, 16, 3, 16),
    graph_key(GraphKind.PIECEWISE, 32, 32, 32),
)


def batch(*q_lens):
    starts = torch.tensor([0, *q_lens]).cumsum(0).numpy()
    return dummy_batch(starts, torch.tensor(q_lens).numpy(), 0, is_prefill=False)


def captured(graphs):
    """Returns the outcome of the next graph, after all of its slices."""
    while (outcome := graphs.capture_slice()) is None:
        pass
    return outcome


@pytest.fixture
def families():
    return {kind: FakeFamily() for kind in GraphKind}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.kind.name)
def test_a_key_goes_to_the_family_of_its_kind(families, key):
    graphs = GraphSet(KEYS, families)
    assert graphs.replay(key, batch(2, 2)) is None
    graphs.capture(key)
    (output,) = graphs.replay(key, batch(2, 2))
    assert len(output) == key.num_tokens
    graphs.warm_up([key])
    called = {kind: family.calls for kind, family in families.items() if family.calls}
    assert called == {key.kind: [("replay", key), ("warm_up", key)]}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.kind.name)
def test_a_graph_with_a_fault_is_dropped_and_reported_once(families, key):
    faults = []
    graphs = GraphSet(KEYS, families, on_fault=faults.append)
    graphs.capture(key)
    families[key.kind].fault = "planted"
    assert graphs.replay(key, batch(2, 2)) is None
    assert graphs.replay(key, batch(2, 2)) is None
    assert [(each.key, each.fault) for each in faults] == [(key, "planted")]
    assert families[key.kind].calls == [("drop", key)]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [((2, 2), 0), ((2, 1), 2), ((9, 1, 6), 2), ((1, 1, 1, 1), 3), ((20,), 3)],
    ids=str,
)
def test_the_smallest_graph_that_a_step_missed_is_captured_next(families, missed, expected):
    graphs = GraphSet(KEYS[1:] + KEYS[:1], families)
    graphs.note_missed(batch(*missed))
    assert captured(graphs).key == KEYS[expected]


@pytest.mark.parametrize(
    ("key", "q_lens"),
    [(KEYS[0], (2, 1)), (KEYS[0], (2,) * 5), (KEYS[2], (1,) * 4), (KEYS[2], (17,))],
    ids=str,
)
def test_a_step_that_does_not_fit_its_graph_is_refused(families, key, q_lens):
    graphs = GraphSet(KEYS, families)
    with pytest.raises(ValueError, match=f"{len(q_lens)} requests for GraphKey"):
        graphs.require_planned(replace(batch(*q_lens), graph_key=key))
