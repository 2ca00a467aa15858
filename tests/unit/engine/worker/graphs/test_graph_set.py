"""One replay for graphs of every kind."""

from dataclasses import replace

import pytest
import torch

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import Captured, GraphCapture
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.compilation.graphs.replay_recorder import ReplayRecorder
from services.engine.compilation.graphs.verdict import Verdict
from services.engine.worker.graphs import graph_set
from services.engine.worker.graphs.background_capture import BackgroundCapture
from services.engine.worker.graphs.graph_set import GraphSet
from services.engine.worker.graphs.whole_graphs import WholeGraphs
from services.engine.worker.inputs.dummy_steps import dummy_batch
from services.engine.worker.inputs.prefix_plan import PlannedPrefixes


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


def sharing_batch(*q_lens):
    none = torch.zeros(0, dtype=torch.int32).numpy()
    prefixes = PlannedPrefixes(tiles=none, queries=none, tile_slots=none, num_shared=none)
    return replace(batch(*q_lens), prefixes=prefixes)


def test_graphs_of_steps_that_share_prefixes_are_captured_once_one_missed_them(families):
    plain = [graph_key(GraphKind.DECODE, size, size, 1) for size in (8, 4)]
    sharing = [replace(key, shares_prefixes=True) for key in plain]
    graphs = GraphSet(plain, families, on_demand=sharing)
    for key in plain:
        assert captured(graphs).key == key
    assert graphs.num_pending == 0
    assert not graphs.has_next
    graphs.replay(plain[1], batch(1, 1, 1, 1))
    assert graphs.num_pending == 0
    assert graphs.replay(plain[1], sharing_batch(1, 1, 1, 1)) is not None  # as it is meanwhile
    assert (graphs.num_pending, graphs.is_next_missed) == (1, True)
    assert captured(graphs).key == sharing[1]
    graphs.replay(plain[1], sharing_batch(1, 1, 1, 1))
    assert graphs.num_pending == 0
    graphs.replay(sharing[1], sharing_batch(1, 1, 1, 1))
    assert families[GraphKind.DECODE].calls[-1] == ("replay", sharing[1])
    # Another rank may have missed one.
    graphs.capture_first(sharing[0])
    assert captured(graphs).key == sharing[0]


def test_memory_bounds_the_graphs_of_steps_that_share_prefixes(families, monkeypatch):
    monkeypatch.setattr(graph_set, "MOST_SHARING", 2)
    plain = [graph_key(GraphKind.DECODE, size, size, 1) for size in (8, 7, 6, 5)]
    on_demand = [replace(key, shares_prefixes=True) for key in plain]
    graphs = GraphSet(plain, families, on_demand=on_demand)
    while graphs.num_pending:
        captured(graphs)
    for key in plain:
        graphs.replay(key, sharing_batch(1, 1, 1, 1))
    assert [captured(graphs).key for _ in range(graphs.num_pending)] == on_demand[:2]
    # Ranks capture together, and another one had room.
    graphs.capture_first(on_demand[3])
    assert captured(graphs).key == on_demand[3]
    graphs.replay(plain[2], sharing_batch(1, 1, 1, 1))
    assert graphs.num_pending == 0


def test_graphs_of_steps_without_adapters_are_captured_once_one_missed_them(families):
    plain = [graph_key(GraphKind.DECODE, size, size, 1) for size in (8, 4)]
    sharing = [replace(plain[0], shares_prefixes=True)]
    skipping = [replace(key, skips_adapters=True) for key in [*sharing, *plain]]
    graphs = GraphSet(plain, families, on_demand=[*skipping, *sharing])
    while graphs.num_pending:
        captured(graphs)
    graphs.replay(plain[1], batch(1, 1, 1, 1))
    assert graphs.num_pending == 0
    without = replace(batch(1, 1, 1, 1), has_adapters=False)
    graphs.replay(plain[1], without)
    assert captured(graphs).key == skipping[2]
    graphs.replay(skipping[2], without)
    # No graph of this size shares prefixes.
    graphs.replay(plain[1], replace(sharing_batch(1, 1, 1, 1), has_adapters=False))
    assert graphs.num_pending == 0
    graphs.replay(plain[0], replace(sharing_batch(*[1] * 8), has_adapters=False))
    assert captured(graphs).key == skipping[0]
    graphs.replay(plain[0], sharing_batch(*[1] * 8))
    assert captured(graphs).key == sharing[0]
    assert graphs.num_pending == 0


def test_a_sharing_graph_with_a_fault_is_not_captured_again(families):
    [plain] = [graph_key(GraphKind.DECODE, 8, 8, 1)]
    sharing = replace(plain, shares_prefixes=True)
    graphs = GraphSet([plain], families, on_demand=[sharing])
    graphs.want(sharing)
    while graphs.num_pending:
        captured(graphs)
    families[GraphKind.DECODE].fault = "planted"
    assert graphs.replay(sharing, sharing_batch(1, 1, 1, 1)) is None
    families[GraphKind.DECODE].fault = None
    assert graphs.replay(plain, sharing_batch(1, 1, 1, 1)) is not None
    assert graphs.num_pending == 0


def test_ranks_that_want_different_graphs_capture_the_same_at_the_same_time():
    plain = [graph_key(GraphKind.DECODE, size, size, 1) for size in (8, 4)]
    sharing = [replace(key, shares_prefixes=True) for key in plain]
    families = [FakeFamily() for _ in range(2)]
    done = [[], []]

    def rank(number):
        def agree(fault):
            done[number].append("agree")
            return fault

        def capture(key):
            done[number].append(key)
            return FakeFamily.capture(families[number], key)

        families[number].capture = capture
        graphs = GraphSet(
            plain, {GraphKind.DECODE: families[number]}, on_demand=sharing, agree=agree
        )
        return graphs, BackgroundCapture(graphs)

    (first, reporter), (second, other) = rank(0), rank(1)
    for graphs, _ in ((first, reporter), (second, other)):
        while graphs.num_pending:
            captured(graphs)
    for graphs in (first, second):
        graphs.replay(plain[0], sharing_batch(*[1] * 8))
    # Requests of one data-parallel rank share prefixes that those of the other do not.
    second.replay(plain[1], sharing_batch(1, 1, 1, 1))
    while first.num_pending:
        order = reporter.due(is_idle=True)
        for each in (reporter, other):
            each.obey(order)
        assert done[0] == done[1]
    assert done[0][-2:] == [sharing[0], "agree"]
    assert second.num_pending == 1


class Scaled:
    """A program whose result depends on a weight."""

    implied = None

    def __init__(self):
        self.weight, self._x = torch.ones(1), torch.zeros(4)

    def inputs(self, key):
        return {"x": self._x}

    def program(self, key):
        return lambda: (self._x * self.weight,)

    def write_dummy(self, key, variant):
        self._x.fill_(1 + variant)


@pytest.mark.parametrize("num_slices", [0, 1, 2, 3, 4])
def test_captures_under_way_begin_again_with_other_weights(num_slices):
    program = Scaled()
    graphs = GraphSet(KEYS[:2], dict.fromkeys(GraphKind, WholeGraphs(program, ReplayRecorder())))
    for _ in range(num_slices):
        assert graphs.capture_slice(max_under_test=1) is None
    program.weight.fill_(5)
    graphs.begin_again()
    assert graphs.num_pending == 2
    outcomes = [captured(graphs) for _ in KEYS[:2]]
    assert {each.key for each in outcomes} == set(KEYS[:2])
    assert [each.fault for each in outcomes] == ["", ""]
    with torch.inference_mode():
        (output,) = graphs.replay(KEYS[0], batch(2, 2))
    assert torch.equal(output, torch.full((4,), 10.0))
