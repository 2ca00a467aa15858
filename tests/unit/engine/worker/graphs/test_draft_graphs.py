"""Drafting by graphs, on the recorder that emulates CUDA graphs."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import get_forward_context
from services.engine import batch
from services.engine.batch import read_int32
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 16
SIZES = (2, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    return folder


def engine(folder, num_speculative_tokens, *sizes, **options):
    mode = CUDAGraphMode.FULL_DECODE_ONLY if sizes else CUDAGraphMode.NONE
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=sizes or None)
    return GraphEngine(folder, config, num_speculative_tokens=num_speculative_tokens, **options)


def captured(folder, num_speculative_tokens, *sizes, **options):
    made = engine(folder, num_speculative_tokens, *sizes, **options)
    assert {outcome.fault for outcome in made.capture()} == {""}
    return made


def drafted(engine):
    """Returns the guesses of each step, by its number."""
    return {r.step_id: read_int32(r.draft_token_ids).tolist() for _, r in engine.steps}


def num_by_graph(engine):
    return sum(result.drafted_by_graph for _, result in engine.steps)


def figures(engine, *, is_draft):
    kind = batch.GraphKind.GRAPH_KIND_DRAFT
    return [each for each in engine.ledger.figures if (each.key.kind == kind) == is_draft]


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_tokens_are_those_of_eager_steps(folder, num_speculative_tokens, temperature):
    eager = engine(folder, num_speculative_tokens)
    expected = eager.run(PROMPTS, NUM_OUTPUT, temperature=temperature)
    by_graph = captured(folder, num_speculative_tokens, *SIZES)
    assert by_graph.run(PROMPTS, NUM_OUTPUT, temperature=temperature) == expected
    assert drafted(by_graph) == drafted(eager)
    assert num_by_graph(by_graph) > 3
    assert num_by_graph(eager) == 0


@pytest.mark.parametrize(
    ("variant", "num_draft_layers"),
    [("deepseek_v3", 2), ("deepseek_v32", 1), ("glm4_moe", 1)],
    ids=str,
)
def test_other_draft_layers_are_captured_too(tmp_path, variant, num_draft_layers):
    write_draft_checkpoint(tmp_path, variant, num_draft_layers=num_draft_layers, agreement=0.98)
    eager = engine(tmp_path, 3)
    expected = eager.run(PROMPTS, NUM_OUTPUT)
    by_graph = captured(tmp_path, 3, *SIZES)
    assert by_graph.run(PROMPTS, NUM_OUTPUT) == expected
    assert drafted(by_graph) == drafted(eager)
    assert num_by_graph(by_graph) > 3


@pytest.mark.parametrize("sampling", [{"logprobs": 2}, {"repetition_penalty": 1.3}], ids=str)
def test_log_probabilities_beside_the_tokens_are_not_lost_in_a_graph(folder, sampling):
    eager, by_graph = engine(folder, 2), captured(folder, 2, *SIZES)
    assert by_graph.run(PROMPTS, NUM_OUTPUT, **sampling) == eager.run(
        PROMPTS, NUM_OUTPUT, **sampling
    )
    assert drafted(by_graph) == drafted(eager)
    for (_, found), (_, wanted) in zip(by_graph.steps, eager.steps, strict=True):
        found, wanted = (
            torch.frombuffer(bytearray(each.logprobs or b"0000"), dtype=torch.float32)
            for each in (found, wanted)
        )
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_requests", [1, 3, 5])
def test_requests_that_fill_a_graph_up_write_to_no_block(folder, num_requests):
    eager, padded = engine(folder, 3), captured(folder, 3, 8)
    for each in (eager, padded):
        each.run(PROMPTS[:num_requests], NUM_OUTPUT)
    assert num_by_graph(padded) > 3
    for expected, found in zip(eager.cache, padded.cache, strict=True):
        # The null block, the first one, takes writes that belong to no request.
        torch.testing.assert_close(found.latent[1:], expected.latent[1:], atol=1e-4, rtol=1e-4)
    dummy_row = padded.runner.buffers.tokens[padded.runner.buffers.dummy_row, :-1]
    assert torch.equal(dummy_row, torch.arange(len(dummy_row), dtype=torch.int32) % 97)
    assert not padded.runner.buffers.block_table[padded.runner.buffers.dummy_row].any()


def test_steps_in_which_not_all_requests_sample_are_drafted_without_a_graph(folder):
    # Chunks of two tokens look like decodes with one draft.
    options = {"max_num_batched_tokens": 2, "max_num_seqs": 1}
    expected = engine(folder, 1, **options).run(PROMPTS, NUM_OUTPUT)
    by_graph = captured(folder, 1, 1, **options)
    assert by_graph.run(PROMPTS, NUM_OUTPUT) == expected
    chunks = [
        result
        for descriptor, result in by_graph.steps
        if not descriptor.fallback_reason and not result.token_ids
    ]
    assert chunks
    assert not any(result.drafted_by_graph for result in chunks)


def test_graphs_of_drafting_are_counted_and_never_ordered(folder):
    by_graph = captured(folder, 2, *SIZES)
    by_graph.run(PROMPTS, NUM_OUTPUT)
    drafts, decodes = figures(by_graph, is_draft=True), figures(by_graph, is_draft=False)
    assert [each.key.graph_bs for each in drafts] == [8, 2]
    assert sum(each.num_replays for each in drafts) == num_by_graph(by_graph)
    assert [each.padded_tokens for each in drafts] == [each.padded_tokens for each in decodes]
    assert not any(
        descriptor.graph_key.kind == batch.GraphKind.GRAPH_KIND_DRAFT
        for descriptor, _ in by_graph.steps
    )


def test_a_graph_that_drafts_otherwise_than_the_layer_is_never_used(folder):
    by_graph = engine(folder, 2, *SIZES)
    num_calls = 0

    def perturb(module, args):
        nonlocal num_calls
        num_calls += 1
        is_captured = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
        return (args[0] + num_calls, *args[1:]) if is_captured else args

    hook = by_graph.model.model.layers[-1].eh_proj.register_forward_pre_hook(perturb)
    faults = {outcome.key.kind: outcome.fault for outcome in by_graph.capture()}
    assert not faults[GraphKind.DECODE]
    assert "its output is off" in faults[GraphKind.DRAFT]
    hook.remove()
    expected = engine(folder, 2).run(PROMPTS, NUM_OUTPUT)
    assert by_graph.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_by_graph(by_graph) == 0
    assert sum(each.num_replays for each in figures(by_graph, is_draft=False)) > 3


def test_a_graph_whose_inputs_have_moved_is_given_up_and_its_step_drafted_without(folder):
    eager, by_graph = engine(folder, 2), captured(folder, 2, *SIZES)
    inputs = by_graph.runner.speculator.programs[GraphKind.DRAFT]
    inputs.sampled = inputs.sampled.clone()
    assert by_graph.run(PROMPTS, NUM_OUTPUT) == eager.run(PROMPTS, NUM_OUTPUT)
    assert drafted(by_graph) == drafted(eager)
    assert num_by_graph(by_graph) == 0
    assert {outcome.key.kind for outcome in by_graph.faults} == {GraphKind.DRAFT}
    assert all("input sampled is" in each.fault for each in by_graph.faults)
    assert sum(each.num_replays for each in figures(by_graph, is_draft=False)) > 3


def test_the_graph_that_drafting_has_missed_is_captured_next(folder):
    by_graph = engine(folder, 2, *SIZES)
    decodes = by_graph.capture(2)
    assert not any(outcome.key.kind is GraphKind.DRAFT for outcome in decodes)
    by_graph.run(PROMPTS[:2], NUM_OUTPUT)
    assert num_by_graph(by_graph) == 0
    assert by_graph.capture(1)[0].key.graph_bs == 2
