"""Assistants of Gemma 4 guess what transformers' do, and cost no token."""

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ConfigError, ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from models.gemma4_assistant_config import AssistantConfig
from models.loading.checkpoint import CheckpointError
from models.loading.draft_model import load_draft_model
from models.loading.loader import load_model
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import read_int32
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from tests.support.compilation import compilation_config
from tests.support.gemma4_assistants import guesses, write_assistant
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.recordings import engine_settings, write_recording
from tests.support.step_driver import greedy_continuation, sampling

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12, 40], [70] * 17]
NUM_OUTPUT, NUM_DRAFTS = 20, 3
GROUPS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
CASES = {
    "gemma4": ("gemma4", {}),
    "groups": ("gemma4", GROUPS),
    "shared": ("gemma4_shared", {}),
    "unified": ("gemma4_unified", GROUPS),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pair(request, tmp_path_factory):
    """Returns the two folders, transformers' two models, and what the first one says."""
    torch.set_num_threads(1)
    variant, fields = request.param
    folder, own = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("assistant")
    target = write_checkpoint(folder, variant, vocab_size=96, global_head_dim=16)
    said = cache(lambda *prompt: greedy_continuation(target, prompt, NUM_OUTPUT))
    return folder, own, target, write_assistant(own, target, **fields), said


def engine(pair, config=None, **options):
    return GraphEngine(
        pair[0],
        config or compilation_config(cudagraph_mode=CUDAGraphMode.NONE),
        num_speculative_tokens=NUM_DRAFTS,
        draft_model=pair[1],
        **options,
    )


def drafts(engine):
    return [read_int32(result.draft_token_ids).tolist() for _, result in engine.steps]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_drafts_are_those_of_transformers(pair, prompt):
    _, _, target, assistant, said = pair
    running = engine(pair)
    [output] = running.run([prompt], NUM_OUTPUT)
    assert output == said(*prompt)
    known, compared = list(prompt), 0
    for _, result in running.steps:
        known += read_int32(result.token_ids).tolist()
        made = read_int32(result.draft_token_ids).tolist()
        if made and len(known) < len(prompt) + NUM_OUTPUT:
            assert made == guesses(target, assistant, known, NUM_DRAFTS)[: len(made)]
            compared += 1
    assert compared > 4


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 40}], ids=str
)
def test_output_is_that_of_a_run_without(pair, options):
    expected = [pair[-1](*prompt) for prompt in PROMPTS]
    assert engine(pair, **options).run(PROMPTS, NUM_OUTPUT) == expected


@pytest.mark.parametrize(
    ("level", "mode"),
    [(0, CUDAGraphMode.FULL_DECODE_ONLY), (3, CUDAGraphMode.FULL_AND_PIECEWISE)],
    ids=str,
)
def test_graphs_draft_what_eager_steps_draft(pair, level, mode, tmp_path):
    eager = engine(pair)
    expected = eager.run(PROMPTS, NUM_OUTPUT), drafts(eager)
    config = compilation_config(
        level=level,
        cudagraph_mode=mode,
        use_inductor=False,
        cudagraph_capture_sizes=(4, 32),
        compile_cache_dir=tmp_path,
    )
    by_graph = engine(pair, config)
    assert {outcome.fault for outcome in by_graph.capture()} == {""}
    assert (by_graph.run(PROMPTS, NUM_OUTPUT), drafts(by_graph)) == expected
    assert any(result.drafted_by_graph for _, result in by_graph.steps)


@pytest.mark.parametrize("pair", [CASES["shared"]], indirect=True, ids=["shared"])
@pytest.mark.parametrize("against", ["eager", "full"])
def test_a_recording_is_replayed(pair, against, tmp_path):
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(4,)
    )
    recorded = engine(pair, config, num_blocks=60)
    recorded.capture()
    recorded.run(PROMPTS, 12)
    settings = engine_settings(pair[0], recorded.limits, num_blocks=60)
    trace = write_recording(
        tmp_path / "trace.binpb", recorded.steps, snapshot=Snapshot(engine=settings)
    )
    flags = {
        "device": "cpu",
        "compilation_level": 0,
        "compile_cache_dir": tmp_path,
        "num_speculative_tokens": NUM_DRAFTS,
    }
    replayed = ReplayConfig.from_flags(
        trace=trace, model=pair[0], draft_model=pair[1], against=against, **flags
    )
    report = []
    totals = replay(replayed, report.append)
    assert totals.is_clean, "\n".join(report)
    assert totals.num_by_graph > 0 if against == "full" else totals.num_exact == totals.num_steps


@pytest.mark.parametrize("pair", [CASES["groups"]], indirect=True, ids=["groups"])
async def test_ranks_share_an_assistants_heads(pair):
    folder, own, *_, said = pair
    expected = [said(*prompt) for prompt in PROMPTS]
    counts = []
    for size in (1, 2):
        config = ranks_config(
            folder,
            tensor_parallel_size=size,
            draft_model=own,
            num_speculative_tokens=NUM_DRAFTS,
            min_speculative_tokens=NUM_DRAFTS,
        )
        async with ranks_core(config) as ranks:
            assert await ranks.generate(PROMPTS, sampling(max_tokens=NUM_OUTPUT)) == expected
            drafts = ranks.core.stats().counters.drafts
        counts.append((drafts.num_verified, drafts.num_accepted))
    assert counts[0] == counts[1]
    assert counts[0][0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    target, own = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("whole_assistant")
    write_assistant(own, write_checkpoint(target, "gemma4", vocab_size=96), **GROUPS)
    return target, own


@pytest.fixture
def folders(whole, tmp_path):
    target, own = whole
    return target, shutil.copytree(own, tmp_path / "assistant")


@pytest.mark.parametrize(
    ("changes", "of_text", "reason"),
    [
        ({"backbone_hidden_size": 33}, {}, "its backbone_hidden_size is 33; the model's is 32"),
        ({}, {"vocab_size": 97}, "its vocab_size is 97; the model's is 96"),
        ({}, {"head_dim": 4}, "its head_dim is 4; the model's is 8"),
        ({}, {"global_head_dim": 12}, "head_dim without a window is 12"),
        ({}, {"num_attention_heads": 3}, "a multiple of 2 kv heads"),
        ({}, {"sliding_window": 9}, "windows of"),
        ({"num_centroids": 7}, {}, "num_centroids"),
    ],
)
def test_an_assistant_of_another_model_is_refused(folders, changes, of_text, reason):
    target, own = folders
    values = json.loads((own / "config.json").read_text())
    text = values["text_config"]
    if "global_head_dim" in of_text or "head_dim" in of_text:
        text.pop("per_layer_config", None)
    text |= {"global_head_dim": 16} | of_text
    (own / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ConfigError, match=reason):
        AssistantConfig.from_folder(own, ModelConfig.from_folder(target))


def test_an_assistant_of_another_family_is_refused(folders, tmp_path):
    write_checkpoint(tmp_path / "other", "llama")
    with pytest.raises(ConfigError, match="an assistant of Gemma 4; the model is Llama"):
        AssistantConfig.from_folder(folders[1], ModelConfig.from_folder(tmp_path / "other"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("pre_projection.weight"), "the first is pre_projection"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "more is unknown"),
        (lambda tensors: tensors["masked_embedding.token_ordering"].add_(1), "out of the vocab"),
        (lambda tensors: tensors.pop("masked_embedding.token_ordering"), "is missing"),
    ],
)
def test_a_damaged_assistant_is_refused(folders, change, reason):
    target, own = folders
    tensors = load_file(own / "model.safetensors")
    change(tensors)
    save_file(tensors, own / "model.safetensors")
    model = load_model(target, device=CPU, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=reason):
        load_draft_model(own, model, device=CPU, dtype=torch.float32, max_positions=64)
