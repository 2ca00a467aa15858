"""Replays of steps that verify drafts, with and without planted faults."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import get_forward_context
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import pack_int32, read_int32
from services.engine.limits import StepLimits
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.replay.recording import ReplayError
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine
from tests.support.recordings import edit_recording, engine_settings, write_recording

NUM_DRAFTS = 3
LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    block_size=4,
    vocab_size=97,
    num_speculative_tokens=NUM_DRAFTS,
)
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    return folder


def record(folder, target):
    """Greedy and random requests with a shared prefix, and graphs for four decodes."""
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(4,)
    )
    engine = GraphEngine(folder, config, num_blocks=60, num_speculative_tokens=NUM_DRAFTS)
    engine.capture()
    engine.run(PROMPTS, 12)
    engine.run(PROMPTS[1:], 8, temperature=1.0, top_p=0.9)
    assert engine.faults == []
    assert sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps) > 10
    snapshot = Snapshot(engine=engine_settings(folder, LIMITS, num_blocks=60))
    return write_recording(target / "trace.binpb", engine.steps, snapshot=snapshot)


@pytest.fixture(scope="module")
def trace(folder, tmp_path_factory):
    return record(folder, tmp_path_factory.mktemp("trace"))


def run(trace, folder, against, load=None, **flags):
    report = []
    config = ReplayConfig.from_flags(
        trace=trace,
        model=folder,
        against=against,
        device="cpu",
        use_inductor=False,
        compilation_level=3 if against == "piecewise" else 0,
        compile_cache_dir=trace.parent / "compiled",
        **flags,
    )
    totals = replay(config, report.append, **({} if load is None else {"load": load}))
    return totals, "\n".join(report)


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_an_honest_recording_shows_no_difference(folder, trace, against):
    totals, report = run(trace, folder, against)
    assert totals.is_clean, report
    assert totals.num_by_graph == 0 if against == "eager" else totals.num_by_graph > 5
    if against == "eager":
        assert totals.num_exact == totals.num_steps


@pytest.mark.parametrize(
    ("variant", "num_draft_layers"), [("deepseek_v3", 2), ("deepseek_v32", 1)], ids=str
)
def test_other_draft_layers_are_replayed_too(tmp_path, variant, num_draft_layers):
    write_draft_checkpoint(tmp_path, variant, num_draft_layers=num_draft_layers, agreement=0.98)
    totals, report = run(record(tmp_path, tmp_path), tmp_path, "full")
    assert totals.is_clean, report
    assert totals.num_by_graph > 5


def perturbing(*, in_first):
    """Returns what loads the model with a draft layer that differs under graphs in one pass."""

    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model

        def perturb(module, args):
            context = get_forward_context()
            is_captured = context.cudagraph_runtime_mode is CUDAGraphMode.FULL
            is_first = context.context.max_q_len > 1
            return (args[0] + 0.25, *args[1:]) if is_captured and is_first == in_first else args

        model.model.layers[-1].eh_proj.register_forward_pre_hook(perturb)
        return loaded

    return load


@pytest.mark.parametrize(("in_first", "draft"), [(True, 1), (False, 2)])
def test_a_draft_layer_that_differs_under_graphs_is_named(folder, trace, in_first, draft):
    totals, report = run(trace, folder, "full", perturbing(in_first=in_first))
    # Graphs of steps with prompts hold no drafting.
    assert 0 < totals.num_different < totals.num_by_graph
    lines = report.splitlines()
    assert lines[0].startswith(f"step {totals.first_difference} differs")
    assert lines[1].startswith(f"  first tensor: draft {draft} q_plain, off by")
    assert "layer" not in report


def test_a_graph_of_drafting_that_fails_its_test_counts_as_a_difference(folder, trace):
    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model
        num_calls = 0

        def perturb(module, args):
            nonlocal num_calls
            num_calls += 1
            is_captured = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
            return (args[0] + num_calls, *args[1:]) if is_captured else args

        model.model.layers[-1].eh_proj.register_forward_pre_hook(perturb)
        return loaded

    totals, report = run(trace, folder, "full", load)
    assert "graph of the drafting behind 4 decodes failed its test: its output is off" in report
    assert totals.num_given_up > 5
    assert totals.num_different == 0
    assert not totals.is_clean


def edited(trace, path, edit):
    return run_of(edit_recording(trace, path, edit))


def run_of(step):
    return step.descriptor.step_id, read_int32(step.descriptor.attn_metadata.row_ids)[0]


def test_one_wrong_draft_is_found_and_named(folder, trace, tmp_path):
    def edit(step):
        drafts = read_int32(step.result.draft_token_ids).tolist()
        if step.descriptor.step_id < 4 or not drafts:
            return False
        step.result.draft_token_ids = pack_int32([drafts[0], (drafts[1] + 1) % 97, *drafts[2:]])
        return True

    step_id, row = edited(trace, tmp_path / "edited.binpb", edit)
    totals, report = run(tmp_path / "edited.binpb", folder, "full")
    assert totals.first_difference == step_id
    assert totals.num_different == totals.num_in_tokens_alone == 1
    assert f"draft 2 of row {row}: recorded" in report


def test_one_wrong_token_among_accepted_drafts_is_found_and_named(folder, trace, tmp_path):
    def edit(step):
        accepted = read_int32(step.result.num_accepted_tokens).tolist()
        tokens = read_int32(step.result.token_ids).tolist()
        if not accepted or not accepted[0]:
            return False
        step.result.token_ids = pack_int32([tokens[0], (tokens[1] + 1) % 97, *tokens[2:]])
        return True

    step_id, row = edited(trace, tmp_path / "edited.binpb", edit)
    totals, report = run(tmp_path / "edited.binpb", folder, "full")
    assert totals.first_difference == step_id
    assert f"token 2 of row {row}: recorded" in report
    assert "draft" not in report.splitlines()[2]


@pytest.mark.parametrize("field", ["token_ids", "num_accepted_tokens", "draft_token_ids"])
def test_a_result_without_what_a_step_brings_is_refused(folder, trace, tmp_path, field):
    def edit(step):
        if not any(read_int32(step.result.num_accepted_tokens)):
            return False
        step.result.ClearField(field)
        return True

    edited(trace, tmp_path / "edited.binpb", edit)
    with pytest.raises(ReplayError, match=r"^step \d+ "):
        run(tmp_path / "edited.binpb", folder, "eager")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
