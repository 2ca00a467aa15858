"""Drafts that the scheduler looks up, verified by the real runner."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import read_int32
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.compilation import compilation_config
from tests.support.foreign_checkpoints import write_foreign_checkpoint
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

PROMPTS = [[5, 17, 3] * 4, [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "llama")
    return folder


def engine(folder, num_drafts=3, config=None, **options):
    sizes = (1, 3) if num_drafts else None
    return GraphEngine(
        folder,
        config or compilation_config(),
        num_speculative_tokens=num_drafts,
        lookup_sizes=sizes,
        **options,
    )


def num_accepted(engine):
    return sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 16, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2},
        {"max_model_len": 36, "num_blocks": 10},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_run_without(folder, options):
    expected = engine(folder, 0, **options).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(folder, **options)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"logprobs": 2}, {"repetition_penalty": 1.2, "temperature": 0.7}],
    ids=str,
)
def test_every_way_to_sample_gives_the_same_tokens(folder, sampling):
    expected = engine(folder, 0).run(PROMPTS, NUM_OUTPUT, **sampling)
    assert engine(folder).run(PROMPTS, NUM_OUTPUT, **sampling) == expected


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_level_gives_the_same_tokens(folder, level):
    expected = engine(folder, 0).run(PROMPTS, NUM_OUTPUT)
    config = compilation_config(level=level)
    assert engine(folder, config=config).run(PROMPTS, NUM_OUTPUT) == expected


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE], ids=str
)
def test_graphs_verify_too(folder, mode):
    prompts = [PROMPTS[0]]
    expected = engine(folder, 0).run(prompts, NUM_OUTPUT)
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2))
    by_graph = engine(folder, config=config)
    assert {outcome.fault for outcome in by_graph.capture()} == {""}
    assert by_graph.run(prompts, NUM_OUTPUT) == expected
    assert any(result.drafted_by_graph for _, result in by_graph.steps)


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY], ids=str)
def test_modules_of_transformers_verify_too(tmp_path, mode):
    write_foreign_checkpoint(tmp_path, "StableLmForCausalLM")
    prompts = [PROMPTS[0], PROMPTS[4]]
    expected = engine(tmp_path, 0).run(prompts, NUM_OUTPUT)
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2))
    speculating = engine(tmp_path, config=config)
    assert {outcome.fault for outcome in speculating.capture()} <= {""}
    assert speculating.run(prompts, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


def test_the_embedded_model_repeats_what_it_reads():
    prompt = [300, 301, 302, 303, 304, 305, 306, 307] * 3
    options = {"max_model_len": 128, "num_blocks": 64}
    expected = engine(TINY_CHECKPOINT, 0, **options).run([prompt], 40)
    speculating = engine(TINY_CHECKPOINT, **options)
    assert speculating.run([prompt], 40) == expected
    assert all(not result.draft_token_ids for _, result in speculating.steps)
