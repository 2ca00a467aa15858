"""Drafts of a small model with caches of its own, through the real scheduler and runner."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import read_int32
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import make_agreeable
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 20


def write_small(folder, target, **overrides):
    """Writes a one-layer model that mostly agrees with the one in `target`."""
    write_checkpoint(folder, "llama", num_hidden_layers=1, **overrides)
    large, small = load_file(target / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        if name in large:
            small[name] = large[name].clone()
    make_agreeable(small, 0.98)
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def folders(request, tmp_path_factory):
    torch.set_num_threads(1)
    target, small = (tmp_path_factory.mktemp(name) for name in ("target", "small"))
    write_checkpoint(target, request.param)
    tensors = load_file(target / "model.safetensors")
    make_agreeable(tensors, 0.98)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_small(small, target)
    return target, small


def engine(folders, num_drafts=3, config=None, **options):
    target, small = folders
    return GraphEngine(
        target,
        config or compilation_config(),
        num_speculative_tokens=num_drafts,
        draft_model=small if num_drafts else None,
        **options,
    )


def accepted_share(engine):
    accepted = sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps)
    drafted = sum(
        int(read_int32(d.spec_decode_metadata.num_draft_tokens).sum()) for d, _ in engine.steps
    )
    return accepted / drafted


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 40, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2},
        {"max_model_len": 36},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_run_without(folders, num_drafts, options):
    expected = engine(folders, 0, **options).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(folders, num_drafts, **options)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert accepted_share(speculating) > 0


def test_the_model_itself_as_its_draft_model_is_always_right(folders):
    target, _ = folders
    speculating = engine((target, target))
    expected = engine(folders, 0).run(PROMPTS, NUM_OUTPUT)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert accepted_share(speculating) > 0.95


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"logprobs": 2}, {"repetition_penalty": 1.2, "temperature": 0.7}],
    ids=str,
)
def test_every_way_to_sample_gives_the_same_tokens(folders, sampling):
    expected = engine(folders, 0).run(PROMPTS, NUM_OUTPUT, **sampling)
    assert engine(folders).run(PROMPTS, NUM_OUTPUT, **sampling) == expected


def test_graphs_draft_what_eager_steps_draft(folders):
    eager = engine(folders)
    expected = eager.run(PROMPTS, NUM_OUTPUT)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2, 8)
    )
    by_graph = engine(folders, config=config)
    assert {outcome.fault for outcome in by_graph.capture()} == {""}
    assert by_graph.run(PROMPTS, NUM_OUTPUT) == expected
    drafts = [
        [read_int32(r.draft_token_ids).tolist() for _, r in e.steps] for e in (eager, by_graph)
    ]
    assert drafts[0] == drafts[1]
    assert any(result.drafted_by_graph for _, result in by_graph.steps)
