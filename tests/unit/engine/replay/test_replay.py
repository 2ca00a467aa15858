"""Replays of what a scheduler and a runner did in this process, with and without planted faults."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import get_forward_context
from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.loader import load_model
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import pack_int32, read_int32
from services.engine.limits import StepLimits
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.replay.recording import Recording, ReplayError
from services.engine.worker.start import loaded_model
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recordings import edit_recording, engine_settings, write_recording

LIMITS = StepLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=4, vocab_size=97
)
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3", num_hidden_layers=4)
    return folder


@pytest.fixture(scope="module")
def trace(folder, tmp_path_factory):
    """Greedy and random requests with a shared prefix, and a graph for four decodes."""
    return record(folder, tmp_path_factory.mktemp("trace"))


def record(folder, target, cache_dtype="auto", mode=CUDAGraphMode.FULL_DECODE_ONLY):
    config = compilation_config(
        cudagraph_mode=mode, cudagraph_capture_sizes=(4,), cudagraph_piece_sizes=(64,)
    )
    is_fp8 = cache_dtype == "fp8_e4m3"
    engine = GraphEngine(
        folder, config, num_blocks=40, cache_dtype=FP8_CACHE_DTYPE if is_fp8 else None
    )
    engine.capture()
    engine.run(PROMPTS, 10)
    engine.run(PROMPTS[1:], 6, temperature=1.0, top_p=0.9)
    assert engine.faults == []
    snapshot = Snapshot(engine=engine_settings(folder, LIMITS, num_blocks=40))
    snapshot.engine.kv_cache_dtype = cache_dtype
    return write_recording(target / "trace.binpb", engine.steps, snapshot=snapshot)


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


def perturbing(layer, mode, *, in_decodes=True, in_prompts=True):
    """Returns what loads the model with other queries of one layer under graphs."""

    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model

        def perturb(module, args):
            context = get_forward_context()
            is_meant = in_prompts if context.context.is_prefill else in_decodes
            is_captured = context.cudagraph_runtime_mode is mode
            return (args[0] + 0.25, *args[1:]) if is_captured and is_meant else args

        model.model.layers[layer].self_attn.attn.register_forward_pre_hook(perturb)
        return loaded

    return load


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_an_honest_recording_shows_no_difference(folder, trace, against):
    totals, report = run(trace, folder, against)
    assert totals.is_clean, report
    num_by_graph = totals.num_by_graph
    if against == "eager":
        assert num_by_graph == 0
    else:
        assert num_by_graph == totals.num_steps or against == "full"
        assert num_by_graph > 10
    assert "differs" not in report
    assert f"{totals.num_steps} steps against {against}: {num_by_graph} by graphs" in report


def test_eager_steps_are_repeated_bit_by_bit(folder, trace):
    totals, _ = run(trace, folder, "eager")
    assert totals.num_exact == totals.num_steps


@pytest.mark.parametrize("against", ["eager", "full"])
def test_a_recording_with_a_cache_of_8_bits_is_replayed_with_one(folder, tmp_path, against):
    totals, report = run(record(folder, tmp_path, "fp8_e4m3"), folder, against)
    assert totals.is_clean, report
    assert totals.num_by_graph == 0 if against == "eager" else totals.num_by_graph > 10


def test_latent_vectors_and_an_index_of_8_bits_are_replayed_as_such(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v32")
    totals, report = run(record(tmp_path, tmp_path, "fp8_e4m3"), tmp_path, "full")
    assert totals.is_clean, report
    assert totals.num_by_graph > 10


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_layers_with_windows_are_replayed_with_blocks_of_their_own(tmp_path, against):
    write_checkpoint(tmp_path, "gpt_oss")
    totals, report = run(record(tmp_path, tmp_path), tmp_path, against)
    assert totals.is_clean, report
    assert totals.num_by_graph == 0 if against == "eager" else totals.num_by_graph > 10


def test_the_recorded_graph_is_captured_and_the_flags_sizes_fill_the_gaps(folder, trace):
    def num_by_graph(decode_size, prompt_size):
        sizes = {
            "cudagraph_capture_sizes": [decode_size],
            "cudagraph_piece_sizes": [prompt_size],
        }
        return run(trace, folder, "full", **sizes)[0].num_by_graph

    num_all = run(trace, folder, "full")[0].num_by_graph
    assert num_by_graph(8, 64) == num_all
    # With room for one token there is no graph of a step with prompts.
    assert 0 < num_by_graph(1, 1) < num_by_graph(8, 1) < num_all


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_a_recording_of_whole_steps_with_prompts_is_replayed(folder, tmp_path, against):
    trace = record(folder, tmp_path, mode=CUDAGraphMode.FULL)
    totals, report = run(trace, folder, against)
    assert totals.is_clean, report
    assert totals.num_by_graph == (0 if against == "eager" else totals.num_steps)


def test_a_layer_that_differs_in_a_whole_step_with_prompts_is_named(folder, tmp_path):
    trace = record(folder, tmp_path, mode=CUDAGraphMode.FULL)
    totals, report = run(trace, folder, "full", perturbing(2, CUDAGraphMode.FULL, in_decodes=False))
    assert totals.first_difference == 1
    assert 0 < totals.num_different < totals.num_by_graph
    lines = report.splitlines()
    assert "prompts and decodes of 5, 36 tokens" in lines[0]
    assert "graph of 64 tokens of at most 8 requests" in lines[0]
    assert lines[1].startswith("  first tensor: layer 2 ")


def test_one_wrong_token_is_found_and_named(folder, trace, tmp_path):
    def edit(step):
        tokens = read_int32(step.result.token_ids).tolist()
        if step.descriptor.step_id < 5 or len(tokens) < 3:
            return False
        step.result.token_ids = pack_int32([tokens[0], (tokens[1] + 1) % 97, *tokens[2:]])
        return True

    edited = edit_recording(trace, tmp_path / "edited.binpb", edit)
    totals, report = run(tmp_path / "edited.binpb", folder, "full")
    step_id = edited.descriptor.step_id
    row = read_int32(edited.descriptor.attn_metadata.row_ids)[1]
    assert totals.first_difference == step_id
    assert f"step {step_id} differs" in report
    wrong = read_int32(edited.result.token_ids)[1]
    right = (wrong - 1) % 97
    assert f"token of row {row}: recorded {wrong}, eager {right}, full {right}" in report
    assert report.count("token of row") == 1
    assert totals.num_in_tokens_alone == totals.num_different


def test_a_layer_that_differs_under_whole_graphs_is_named_with_its_first_tensor(folder, trace):
    totals, report = run(trace, folder, "full", perturbing(2, CUDAGraphMode.FULL, in_prompts=False))
    assert 0 < totals.num_different < totals.num_by_graph
    lines = report.splitlines()
    assert lines[0].startswith(f"step {totals.first_difference} differs")
    assert "decodes of 5, graph of 8 decodes" in lines[0]
    assert lines[1].startswith("  first tensor: layer 2 ")
    assert "layer 1" not in report


def test_a_stray_write_to_the_cache_shows_in_the_attention_output(folder, trace):
    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model

        def scribble(module, args, kwargs):
            context = get_forward_context()
            if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
                context.kv_cache_data[1].v[1:].mul_(1.5)  # the null block is the capture's

        model.model.layers[1].self_attn.attn.register_forward_pre_hook(scribble, with_kwargs=True)
        return loaded

    _, report = run(trace, folder, "full", load)
    assert "first tensor: layer 1 attention output" in report


def test_a_stray_write_to_latent_vectors_shows_in_the_attention_output(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v32")
    trace = record(tmp_path, tmp_path)

    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model

        def scribble(module, args):
            context = get_forward_context()
            if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
                for tensor in context.kv_cache_data[1].tensors().values():
                    tensor[1:].mul_(1.5)

        model.model.layers[1].self_attn.register_forward_pre_hook(scribble)
        return loaded

    assert run(trace, tmp_path, "full")[0].is_clean
    _, report = run(trace, tmp_path, "full", load)
    assert "first tensor: layer 1 attention output" in report


def test_a_layer_that_differs_when_compiled_is_named_in_pieces_too(
    folder, trace, tmp_path, monkeypatch
):
    def perturb(module, args):
        return (args[0] + 0.25, *args[1:]) if torch.compiler.is_compiling() else args

    def load_perturbed(*args, **kwargs):
        model = load_model(*args, **kwargs)
        model.model.layers[2].self_attn.attn.register_forward_pre_hook(perturb)
        return model

    def load(config):
        # Another start's trace has no hook.
        return LoadedModel.load(config.with_flags(compile_cache_dir=tmp_path))

    monkeypatch.setattr(loaded_model, "load_model", load_perturbed)
    totals, report = run(trace, folder, "piecewise", load)
    assert totals.first_difference == 1
    assert "graphs of pieces of" in report
    assert "first tensor: layer 2 " in report


def test_the_final_hidden_states_are_named_when_all_attention_agrees(folder, trace):
    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model

        def perturb(module, args, output):
            is_captured = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
            return output + 0.25 if is_captured else output

        model.model.norm.register_forward_hook(perturb)
        return loaded

    _, report = run(trace, folder, "full", load)
    assert "first tensor: final hidden states" in report


def test_a_graph_that_fails_its_test_is_reported_and_counts_as_a_difference(folder, trace):
    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model
        num_calls = 0

        def perturb(module, args):
            nonlocal num_calls
            num_calls += 1
            is_captured = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
            return (args[0] + num_calls, *args[1:]) if is_captured else args

        model.model.layers[0].self_attn.attn.register_forward_pre_hook(perturb)
        return loaded

    totals, report = run(trace, folder, "full", load)
    assert "graph of 4 decodes failed its test: its output is off" in report
    assert totals.num_given_up > 10
    assert (totals.num_by_graph, totals.num_different) == (0, 0)
    assert not totals.is_clean


def test_a_recorded_token_outside_the_vocabulary_is_refused(folder, trace, tmp_path):
    def edit(step):
        num_tokens = len(read_int32(step.result.token_ids))
        step.result.token_ids = pack_int32([97] * num_tokens)
        return num_tokens > 0

    path = tmp_path / "edited.binpb"
    edit_recording(trace, path, edit)
    with pytest.raises(ReplayError, match="is not among 97 ids"):
        run(path, folder, "eager")


def test_a_cut_recording_is_replayed_as_far_as_it_is_whole(folder, trace, tmp_path):
    content = trace.read_bytes()
    path = tmp_path / "cut.binpb"
    path.write_bytes(content[: len(content) // 2])
    totals, report = run(path, folder, "eager")
    assert totals.is_clean
    assert 0 < totals.num_steps < Recording.open(trace).num_steps
    assert report.startswith(f"{path} ends in the middle of a message")


def test_one_process_replays_whatever_the_flags_of_ranks_say(folder, trace):
    totals, _ = run(trace, folder, "eager", tensor_parallel_size=3, all_reduce="fused")
    assert totals.is_clean


def test_another_model_is_refused(trace, tmp_path):
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ReplayError, match=r"of model .* \(Qwen3ForCausalLM\)"):
        run(trace, tmp_path, "eager")


def test_a_model_that_is_traced_at_every_step_has_no_pieces(folder, trace):
    config = ReplayConfig.from_flags(
        trace=trace, model=folder, against="piecewise", device="cpu", compilation_level=1
    )
    with pytest.raises(ReplayError, match="--compilation-level"):
        replay(config, print)


def test_a_descriptor_that_contradicts_itself_is_refused_with_its_step(folder, trace, tmp_path):
    def edit(step):
        if step.descriptor.step_id != 3:
            return False
        step.descriptor.context.num_tokens += 1
        return True

    path = tmp_path / "edited.binpb"
    edit_recording(trace, path, edit)
    with pytest.raises(ReplayError, match="step 3 of the recording is damaged"):
        run(path, folder, "eager")


def test_a_graph_without_a_kind_is_refused_with_its_step(folder, trace, tmp_path):
    def edit(step):
        if not step.descriptor.HasField("graph_key"):
            return False
        step.descriptor.graph_key.ClearField("kind")
        return True

    path = tmp_path / "edited.binpb"
    step_id = edit_recording(trace, path, edit).descriptor.step_id
    with pytest.raises(ReplayError, match=f"step {step_id} of the recording is damaged"):
        run(path, folder, "full")


def test_a_result_without_its_tokens_is_refused(folder, trace, tmp_path):
    def edit(step):
        step.result.ClearField("token_ids")
        return True

    path = tmp_path / "edited.binpb"
    edit_recording(trace, path, edit)
    with pytest.raises(ReplayError, match="the recording has 0"):
        run(path, folder, "eager")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
