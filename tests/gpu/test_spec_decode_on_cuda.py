"""Speculation on a GPU: the tokens of a run without, by whole graphs."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.deepseek_mtp import DeepseekMTP
from models.forward_context import forward_context
from models.loading.loader import load_model
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import FallbackReason, read_int32
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.limits import StepLimits
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine
from tests.support.local_draft_checkpoints import write_local_draft_checkpoint
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import VARIANTS, write_checkpoint
from tests.support.recordings import engine_settings, write_recording

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 24
TINY_EAGLE3_CHECKPOINT = TINY_CHECKPOINT.with_name("tiny_eagle3")
WIDE_HEADS = {"glm4_moe": {"head_dim": 64}}
"""Dimensions that kernels need and the smallest shapes do not have."""
SIZES = (1, 2, 4, 8)
RAN_GRAPH = FallbackReason.FALLBACK_REASON_UNSPECIFIED
RANDOM = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
EDITED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    return folder


def engine(folder, num_speculative_tokens, *sizes, **changes):
    mode = CUDAGraphMode.FULL_DECODE_ONLY if sizes else CUDAGraphMode.NONE
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=sizes or None)
    made = GraphEngine(
        folder, config, device="cuda", num_speculative_tokens=num_speculative_tokens, **changes
    )
    num_kinds = 2 if num_speculative_tokens else 1
    assert [outcome.fault for outcome in made.capture()] == [""] * (len(sizes) * num_kinds)
    return made


def num_accepted(engine):
    return sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps)


def verifications(engine):
    """Why each step that only verified drafts ran without a graph, if it did."""
    return {
        reason
        for (descriptor, _), reason in zip(engine.steps, engine.reasons, strict=True)
        if not descriptor.context.is_prefill
    }


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
@pytest.mark.parametrize("sampling", [{}, RANDOM, EDITED], ids=["greedy", "random", "edited"])
def test_graphs_give_the_tokens_of_a_run_without_drafts(folder, num_speculative_tokens, sampling):
    expected = engine(folder, 0).run(PROMPTS, NUM_OUTPUT, **sampling)
    speculating = engine(folder, num_speculative_tokens, *SIZES)
    assert speculating.run(PROMPTS, NUM_OUTPUT, **sampling) == expected
    assert verifications(speculating) == {RAN_GRAPH}
    assert num_accepted(speculating) > 0


@pytest.mark.parametrize("sizes", [(), SIZES], ids=["eager", "graphs"])
@pytest.mark.parametrize("variant", ["mimo_v2", "deepseek_v4"])
def test_draft_layers_with_a_window_change_no_token(tmp_path, variant, sizes):
    if variant not in VARIANTS:
        pytest.skip("this transformers lacks the family")
    write_local_draft_checkpoint(tmp_path, variant, agreement=0.98)
    expected = engine(tmp_path, 0).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(tmp_path, 2, *sizes)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


@pytest.mark.parametrize("sampling", [{}, RANDOM, EDITED], ids=["greedy", "random", "edited"])
def test_a_request_alone_has_the_tokens_of_a_run_without_drafts(folder, sampling):
    for prompt in PROMPTS:
        expected = engine(folder, 0).run([prompt], NUM_OUTPUT, **sampling)
        assert engine(folder, 3, *SIZES).run([prompt], NUM_OUTPUT, **sampling) == expected


@pytest.mark.parametrize("sampling", [{}, RANDOM, EDITED], ids=["greedy", "random", "edited"])
@pytest.mark.parametrize("sizes", [(), SIZES], ids=["eager", "graphs"])
def test_a_second_step_in_flight_changes_no_token(folder, sampling, sizes):
    waiting, carrying = (engine(folder, 3, *sizes, max_in_flight=count) for count in (1, 2))
    for _ in range(2):  # the second time prompts are found in the prefix cache
        expected = waiting.run(PROMPTS, NUM_OUTPUT, **sampling)
        assert carrying.run(PROMPTS, NUM_OUTPUT, **sampling) == expected
    assert any(each.spec_decode_metadata.carried_requests for each in carrying.sent.values())
    assert not any(each.spec_decode_metadata.carried_requests for each in waiting.sent.values())


def test_a_completed_step_repeats_what_the_carried_one_gave(folder):
    carrying, again = engine(folder, 3), engine(folder, 3)
    carrying.run(PROMPTS, NUM_OUTPUT)
    for step, result in carrying.steps:
        repeated = again.runner.execute(step).message()
        assert repeated.token_ids == result.token_ids
        assert repeated.draft_token_ids == result.draft_token_ids


def decode_steps(engine):
    """The steps that only verified drafts."""
    return [(d, r) for d, r in engine.steps if not d.context.is_prefill]


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
@pytest.mark.parametrize(("variant", "num_layers"), [("deepseek_v3", 2), ("deepseek_v32", 1)])
def test_drafts_made_by_graphs_are_those_of_eager_steps(
    tmp_path, num_speculative_tokens, variant, num_layers
):
    write_draft_checkpoint(tmp_path, variant, num_draft_layers=num_layers, agreement=0.98)
    eager = engine(tmp_path, num_speculative_tokens)
    expected = eager.run(PROMPTS, NUM_OUTPUT)
    by_graph = engine(tmp_path, num_speculative_tokens, *SIZES)
    assert by_graph.run(PROMPTS, NUM_OUTPUT) == expected
    drafts = [
        [read_int32(result.draft_token_ids).tolist() for _, result in each.steps]
        for each in (eager, by_graph)
    ]
    assert drafts[0] == drafts[1]
    steps = decode_steps(by_graph)
    assert len(steps) > 3
    assert all(result.drafted_by_graph for _, result in steps)


def test_requests_that_fill_a_drafting_graph_up_write_to_no_block(folder):
    eager, padded = engine(folder, 3), engine(folder, 3, 8)
    for each in (eager, padded):
        each.run(PROMPTS[:3], NUM_OUTPUT)
    assert all(result.drafted_by_graph for _, result in decode_steps(padded))
    for expected, found in zip(eager.cache, padded.cache, strict=True):
        # The null block, the first one, takes writes that belong to no request.
        torch.testing.assert_close(found.latent[1:], expected.latent[1:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"num_blocks": 14, "max_num_batched_tokens": 16}], ids=str)
def test_eager_steps_do_too(folder, options):
    expected = engine(folder, 0, **options).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(folder, 3, **options)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


@pytest.mark.parametrize("variant", ["deepseek_v32", "glm4_moe"])
def test_other_attention_does_too(tmp_path, variant):
    write_draft_checkpoint(tmp_path, variant, agreement=0.98, **WIDE_HEADS.get(variant, {}))
    expected = engine(tmp_path, 0).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(tmp_path, 2, *SIZES)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert verifications(speculating) == {RAN_GRAPH}


def test_in_bfloat16_most_tokens_are_the_same(folder):
    # Another number of query tokens rounds otherwise: a near tie may end differently.
    options = {"dtype": torch.bfloat16}
    expected = engine(folder, 0, **options).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(folder, 2, *SIZES, **options)
    outputs = speculating.run(PROMPTS, NUM_OUTPUT)
    common = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), NUM_OUTPUT)
        for x, y in zip(outputs, expected, strict=True)
    ]
    assert sum(common) > 0.5 * NUM_OUTPUT * len(PROMPTS)
    assert num_accepted(speculating) > 0


@pytest.mark.parametrize("against", ["eager", "full"])
def test_an_honest_recording_shows_no_difference(folder, tmp_path, against):
    recorded = engine(folder, 2, *SIZES)
    recorded.run(PROMPTS, NUM_OUTPUT)
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=4,
        vocab_size=97,
        num_speculative_tokens=2,
    )
    snapshot = Snapshot(engine=engine_settings(folder, limits, num_blocks=64))
    trace = write_recording(tmp_path / "trace.binpb", recorded.steps, snapshot=snapshot)
    report = []
    config = ReplayConfig.from_flags(trace=trace, model=folder, against=against, device="cuda")
    totals = replay(config, report.append)
    assert totals.is_clean, "\n".join(report)
    assert (totals.num_by_graph > 3) == (against == "full")


@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
def test_a_head_at_every_level_and_graph_gives_the_tokens_of_a_run_without(level, mode):
    options = {"device": "cuda", "max_num_batched_tokens": 128, "max_model_len": 128}
    expected = GraphEngine(TINY_CHECKPOINT, compilation_config(), **options)
    config = compilation_config(
        level=level,
        cudagraph_mode=CUDAGraphMode[mode.upper()],
        cudagraph_capture_sizes=(4, 8, 64),
        use_inductor=False,
    )
    speculating = GraphEngine(
        TINY_CHECKPOINT,
        config,
        num_speculative_tokens=3,
        draft_model=TINY_EAGLE3_CHECKPOINT,
        **options,
    )
    assert {outcome.fault for outcome in speculating.capture()} == {""}
    tokens = expected.run(PROMPTS, NUM_OUTPUT)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == tokens
    assert verifications(speculating) == {RAN_GRAPH}
    by_graph = [result.drafted_by_graph for _, result in decode_steps(speculating)]
    assert all(by_graph) if mode != "piecewise" else not any(by_graph)


def test_drafts_are_those_of_the_cpu(folder):
    def drafted(device):
        model = load_model(
            folder, device=torch.device(device), dtype=torch.float32, with_draft_layers=True
        )
        runner, layers = PagedRunner(model, device=device), DeepseekMTP(model)
        sequence = runner.add(PROMPTS[1])
        runner._grow(sequence, len(PROMPTS[1]))
        input_ids, context = runner.prepare([(sequence, len(PROMPTS[1]))])
        positions = context.context.positions
        following = torch.tensor([*PROMPTS[1][1:], 23], device=device)
        with forward_context(context), torch.inference_mode():
            hidden = model(input_ids, positions)
            return layers.compute_logits(layers(following, positions, hidden, 0), 0).cpu()

    expected, actual = drafted("cpu"), drafted("cuda")
    assert ((actual - expected).abs().max() / expected.abs().max()) < 1e-3


def test_an_assistants_graphs_draft_what_eager_steps_draft(tmp_path):
    pytest.importorskip("transformers.models.gemma4_unified_assistant")
    from tests.support.gemma4_assistants import write_assistant

    target, assistant = tmp_path / "target", tmp_path / "assistant"
    sizes = {"vocab_size": 96, "head_dim": 32, "global_head_dim": 64}
    written = write_checkpoint(target, "gemma4", **sizes)
    write_assistant(assistant, written, use_ordered_embeddings=True, num_centroids=16)
    expected = engine(target, 0).run(PROMPTS, NUM_OUTPUT)
    eager, by_graph = (engine(target, 3, *each, draft_model=assistant) for each in ((), SIZES))
    assert eager.run(PROMPTS, NUM_OUTPUT) == by_graph.run(PROMPTS, NUM_OUTPUT) == expected
    drafts = [
        [read_int32(result.draft_token_ids).tolist() for _, result in each.steps]
        for each in (eager, by_graph)
    ]
    assert drafts[0] == drafts[1]
    assert any(result.drafted_by_graph for _, result in by_graph.steps)
