"""Speculation through the real scheduler and the real runner: the tokens of a run without it."""

import pytest
import torch

from services.engine.batch import read_int32
from services.engine.compilation_config import CompilationConfig
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    return folder


def engine(folder, num_speculative_tokens, **options):
    return GraphEngine(
        folder, CompilationConfig(), num_speculative_tokens=num_speculative_tokens, **options
    )


def num_accepted(engine):
    return sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps)


def num_drafts(engine):
    return sum(
        int(read_int32(d.spec_decode_metadata.num_draft_tokens).sum()) for d, _ in engine.steps
    )


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_a_run_without(folder, num_speculative_tokens, temperature):
    plain = engine(folder, 0)
    expected = plain.run(PROMPTS, NUM_OUTPUT, temperature=temperature)
    speculating = engine(folder, num_speculative_tokens)
    assert speculating.run(PROMPTS, NUM_OUTPUT, temperature=temperature) == expected
    print(num_accepted(speculating), num_drafts(speculating), len(plain.steps), len(speculating.steps))
    assert num_accepted(speculating) > 0
    assert len(speculating.steps) < len(plain.steps)
