"""Whole steps with prompts as graphs: the real scheduler and ModelRunner, a CPU recorder."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from services.engine import batch
from services.engine.compilation.graphs import capture_plan
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 6
RAN_GRAPH = batch.FallbackReason.FALLBACK_REASON_UNSPECIFIED
WHOLE = batch.CUDAGraphMode.CUDA_GRAPH_MODE_FULL


def full_graphs(*sizes):
    return compilation_config(cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=sizes)


@pytest.fixture(scope="module")
def eager(folder):
    return GraphEngine(folder, compilation_config(), max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def engine(folder):
    engine = GraphEngine(folder, full_graphs(1, 2, 7, 16), max_num_batched_tokens=16)
    assert {outcome.fault for outcome in engine.capture()} == {""}
    return engine


def orders_with_prompts(engine):
    return [step for step, _ in engine.steps if step.attn_metadata.max_seqlen_q > 1]


def test_steps_with_prompts_are_whole_graphs_and_give_the_tokens_of_eager_steps(eager, engine):
    assert engine.run(PROMPTS, NUM_OUTPUT) == eager.run(PROMPTS, NUM_OUTPUT)
    assert set(engine.reasons) == {RAN_GRAPH}
    ordered = orders_with_prompts(engine)
    # The longest prompt comes in chunks, beside decodes and with padding.
    assert len(ordered) > 2
    assert any(step.graph_key.num_tokens > step.context.num_tokens for step in ordered)
    assert {step.cudagraph_runtime_mode for step in ordered} == {WHOLE}


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, 96), min_size=1, max_size=40), min_size=1, max_size=11
    ),
    num_output=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_any_mix_of_requests_gives_the_same_tokens(eager, engine, prompts, num_output, temperature):
    expected = eager.run(prompts, num_output, temperature=temperature)
    assert engine.run(prompts, num_output, temperature=temperature) == expected


def test_few_requests_take_a_graph_without_room_for_many(folder, eager, monkeypatch):
    monkeypatch.setattr(capture_plan, "FEW_REQUESTS", 2)
    engine = GraphEngine(folder, full_graphs(16), max_num_batched_tokens=16)
    engine.capture()
    prompts = [prompt[:3] for prompt in PROMPTS]
    for number, room in ((5, 8), (2, 2)):
        expected = eager.run(prompts[:number], NUM_OUTPUT)
        assert engine.run(prompts[:number], NUM_OUTPUT) == expected
        assert orders_with_prompts(engine)[-1].graph_key.graph_bs == room


def test_a_bad_graph_is_quarantined_and_its_steps_run_without_it(folder, eager):
    engine = GraphEngine(folder, full_graphs(16), max_num_batched_tokens=16)
    engine.capture()
    key = next(key for key in engine.prepared.graphs.planned if key.kind is GraphKind.MIXED)
    engine.runner.buffers.tokens = engine.runner.buffers.tokens.clone()
    assert engine.run(PROMPTS, NUM_OUTPUT) == eager.run(PROMPTS, NUM_OUTPUT)
    assert key in {outcome.key for outcome in engine.faults}


def test_dummy_requests_never_write_to_a_block_that_anybody_can_own(folder):
    engine = GraphEngine(folder, full_graphs(16), max_num_batched_tokens=16)
    engine.capture()
    for layer in engine.cache:
        assert layer.k[0].any()
        assert not layer.k[1:].any()
    engine.run([[5, 17, 3]], 1)
    for layer in engine.cache:
        assert layer.k[1:].flatten(0, 1).any(-1).any(-1).sum() == 3
