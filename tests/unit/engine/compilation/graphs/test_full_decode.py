"""Whole decode steps as graphs: the real scheduler, the real ModelRunner, a CPU recorder."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import get_forward_context
from services.engine.batch import FallbackReason
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.worker.start.graph_setup import graph_report
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 12
RAN_GRAPH = FallbackReason.FALLBACK_REASON_UNSPECIFIED


def decode_graphs(*sizes):
    return compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=sizes
    )


@pytest.fixture(scope="module")
def eager(folder):
    return GraphEngine(folder, compilation_config())


@pytest.fixture(scope="module")
def engine(folder):
    engine = GraphEngine(folder, decode_graphs(1, 2, 4, 8))
    assert [outcome.fault for outcome in engine.capture()] == [""] * 4
    return engine


def is_decode(step):
    return step[0].attn_metadata.max_seqlen_q == 1


def test_graphs_give_the_tokens_of_eager_steps(eager, engine):
    assert engine.run(PROMPTS, NUM_OUTPUT) == eager.run(PROMPTS, NUM_OUTPUT)
    reasons = [r for s, r in zip(engine.steps, engine.reasons, strict=True) if is_decode(s)]
    assert len(reasons) > NUM_OUTPUT - 3
    assert set(reasons) == {RAN_GRAPH}


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, 96), min_size=1, max_size=20), min_size=1, max_size=11
    ),
    num_output=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_any_mix_of_requests_gives_the_same_tokens(eager, engine, prompts, num_output, temperature):
    expected = eager.run(prompts, num_output, temperature=temperature)
    assert engine.run(prompts, num_output, temperature=temperature) == expected


def test_requests_that_are_preempted_and_padded_give_the_same_tokens(folder):
    prompts = [[n, 3, n, 5, 6, 7] for n in range(6)]
    small = {"num_blocks": 12, "max_num_seqs": 6}
    plain = GraphEngine(folder, compilation_config(), **small)
    engine = GraphEngine(folder, decode_graphs(4, 6), **small)
    engine.capture()
    assert engine.run(prompts, 20) == plain.run(prompts, 20)
    assert engine.scheduler.counts.num_preemptions > 0
    assert any(figures.padded_tokens for figures in engine.ledger.figures)


def test_dummy_requests_never_write_to_a_block_that_anybody_can_own(folder):
    engine = GraphEngine(folder, decode_graphs(8))
    engine.capture()
    for layer in engine.cache:
        assert layer.k[0].any()
        assert not layer.k[1:].any()
    engine.run([[5, 17, 3]], 3)
    owned = [layer.k.flatten(0, 1).any(-1).any(-1).nonzero().flatten() for layer in engine.cache]
    first_block = [slots[slots >= 4] // 4 for slots in owned]
    # Three prompt tokens and two outputs were computed: five slots in two blocks.
    assert all(len(blocks) == 5 and len(set(blocks.tolist())) == 2 for blocks in first_block)


def test_a_batch_beyond_the_largest_graph_falls_back_with_a_reason(folder, eager):
    engine = GraphEngine(folder, decode_graphs(1, 2))
    engine.capture()
    assert engine.run(PROMPTS, NUM_OUTPUT) == eager.run(PROMPTS, NUM_OUTPUT)
    decodes = {r for s, r in zip(engine.steps, engine.reasons, strict=True) if is_decode(s)}
    assert FallbackReason.FALLBACK_REASON_OVERSIZE in decodes


def test_graphs_that_come_while_serving_are_used_from_then_on(folder, eager):
    engine = GraphEngine(folder, decode_graphs(1, 2, 4, 8))
    expected = eager.run(PROMPTS[:2], NUM_OUTPUT)
    assert engine.run(PROMPTS[:2], NUM_OUTPUT) == expected
    assert RAN_GRAPH not in engine.reasons
    assert FallbackReason.FALLBACK_REASON_UNCAPTURED in engine.reasons
    # Most steps had two requests, so that size comes first.
    assert [outcome.key.graph_bs for outcome in engine.capture(1)] == [2]
    assert engine.run(PROMPTS[:2], NUM_OUTPUT) == expected
    assert RAN_GRAPH in engine.reasons
    assert [outcome.key.graph_bs for outcome in engine.capture()] == [8, 4, 1]


def test_graphs_are_captured_large_ones_first(folder):
    engine = GraphEngine(folder, decode_graphs(1, 4, 2, 9, 64))
    assert [outcome.key.graph_bs for outcome in engine.capture()] == [4, 2, 1]


def test_a_graph_serves_only_after_its_verdict_was_read(folder):
    engine = GraphEngine(folder, decode_graphs(2, 4))
    graphs = engine.prepared.graphs
    large, small = graphs.planned
    outcomes = [graphs.capture_slice(max_under_test=1) for _ in range(6)]
    assert outcomes == [None] * 6
    assert not graphs.is_captured(large)
    assert graphs.capture_slice(max_under_test=1).key == large
    assert (graphs.is_captured(large), graphs.is_captured(small)) == (True, False)
    assert graphs.num_pending == 1
    assert graphs.capture_slice().key == small
    assert graphs.is_captured(small)
    assert not graphs.num_pending


def test_steps_between_the_slices_of_a_capture_change_nothing(folder, eager):
    engine = GraphEngine(folder, decode_graphs(2, 4))
    expected = eager.run(PROMPTS[:3], 4)
    outcomes = []
    while engine.prepared.graphs.num_pending:
        outcome = engine.prepared.graphs.capture_slice()
        if outcome is not None:
            outcomes.append(outcome)
            engine.ledger.take(graph_report(outcome))
        assert engine.run(PROMPTS[:3], 4) == expected
    assert [(each.key.graph_bs, each.fault) for each in outcomes] == [(4, ""), (2, "")]


def test_several_graphs_may_be_under_test_and_come_out_in_order(folder):
    graphs = GraphEngine(folder, decode_graphs(1, 2, 4, 8)).prepared.graphs
    outcomes = []
    while graphs.num_pending:
        outcomes.append(graphs.capture_slice(max_under_test=2))
    assert outcomes[:9] == [None] * 9
    assert [outcome.key for outcome in outcomes if outcome] == list(graphs.planned)


def test_a_bad_graph_among_good_ones_is_found_by_its_own_test(folder):
    engine = GraphEngine(folder, decode_graphs(1, 2, 4))
    model = engine.model

    def spoils_two(*inputs):
        context = get_forward_context()
        if context.context.batch_size != 2:
            return model(*inputs)
        return model(*inputs) * float(max(context.attn_metadata.seq_lens.tolist()))

    engine.runner.forward.run_model = spoils_two
    outcomes = engine.prepared.capture_all(lambda stage: None)
    assert [(o.key.graph_bs, bool(o.fault)) for o in outcomes] == [
        (4, False),
        (2, True),
        (1, False),
    ]
    graphs = engine.prepared.graphs
    assert [graphs.is_captured(key) for key in graphs.planned] == [True, False, True]


class TestAPlantedBadGraph:
    def test_an_input_that_moved_is_caught_and_the_tokens_stay_right(self, folder, eager):
        engine = GraphEngine(folder, decode_graphs(4, 8))
        engine.capture()
        buffers = engine.runner.buffers
        buffers.block_table = buffers.block_table.clone()
        engine.runner.forward._block_tables = [buffers.block_table]
        assert engine.run(PROMPTS[:3], NUM_OUTPUT) == eager.run(PROMPTS[:3], NUM_OUTPUT)
        assert [fault.key.graph_bs for fault in engine.faults] == [4, 8]
        assert "input block_table" in engine.faults[0].fault
        reported = [figures.fault for figures in engine.ledger.figures]
        assert len(reported) == 2
        assert all("block_table" in fault for fault in reported)
        assert FallbackReason.FALLBACK_REASON_QUARANTINED in engine.reasons
        assert RAN_GRAPH not in engine.reasons

    def test_a_graph_that_keeps_numbers_of_its_capture_never_serves(self, folder, eager):
        engine = GraphEngine(folder, decode_graphs(4))
        model = engine.model

        def reads_lengths_on_the_host(*inputs):
            longest = max(get_forward_context().attn_metadata.seq_lens.tolist())
            return model(*inputs) * float(longest)

        engine.runner.forward.run_model = reads_lengths_on_the_host
        (outcome,) = engine.capture()
        assert "off by" in outcome.fault
        engine.runner.forward.run_model = model
        assert engine.run(PROMPTS[:3], 5) == eager.run(PROMPTS[:3], 5)
        assert FallbackReason.FALLBACK_REASON_QUARANTINED in engine.reasons

    def test_a_program_that_reads_back_is_refused(self, folder):
        engine = GraphEngine(folder, decode_graphs(4))

        def waits(input_ids, positions):
            assert input_ids.sum().item() >= 0
            return engine.model(input_ids, positions)

        engine.runner.forward.run_model = waits
        (outcome,) = engine.capture()
        assert "reads a tensor's content" in outcome.fault

    def test_steps_of_a_lost_graph_take_the_next_larger_one(self, folder, eager):
        engine = GraphEngine(folder, decode_graphs(4, 8))
        engine.capture()
        engine.prepared.graphs.give_up(
            engine.prepared.graphs.planned[1], GraphFaultError("planted")
        )
        assert engine.run(PROMPTS[:3], 6) == eager.run(PROMPTS[:3], 6)
        assert [(f.key.graph_bs, f.num_replays > 0) for f in engine.ledger.figures] == [
            (8, True),
            (4, False),
        ]
