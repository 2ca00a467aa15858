"""Steps whose number of drafts changes: their tokens, their graphs and their counts."""

import itertools
from dataclasses import replace

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from services.engine.batch import read_int32
from services.engine.spec_decode.draft_length import DraftLength
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 28
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


class Cycle(DraftLength):
    """Chooses every number in turn, each for some steps."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.turns = itertools.cycle(length for length in (2, 0, 3, 1) for _ in range(3))

    def choose(self, num_requests, *, most):
        return next(self.turns)


@pytest.fixture(scope="module", params=["draft_layers", "small_model", "eagle3", "ngram"])
def source(request, tmp_path_factory):
    """The model's folder and the options of one way to draft."""
    torch.set_num_threads(1)
    folder, head = (tmp_path_factory.mktemp(name) for name in ("model", "head"))
    if request.param == "draft_layers":
        write_draft_checkpoint(folder, agreement=0.98)
        return folder, {}
    write_checkpoint(folder, "llama", num_hidden_layers=4)
    if request.param == "ngram":
        return folder, {"lookup_sizes": (1, 3)}
    if request.param == "small_model":
        return folder, {"draft_model": folder}
    write_eagle3_head(head, folder, **LAYERS)
    return folder, {"draft_model": head}


def engine(source, *sizes):
    folder, options = source
    mode = CUDAGraphMode.FULL_DECODE_ONLY if sizes else CUDAGraphMode.NONE
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=sizes or None)
    made = GraphEngine(
        folder, config, num_speculative_tokens=3, min_speculative_tokens=0, **options
    )
    assert {outcome.fault for outcome in made.capture()} <= {""}
    plan = made.scheduler._drafts
    made.scheduler._drafts = replace(plan, length=Cycle(plan.length.lengths))
    return made


def without_drafts(source):
    folder, _ = source
    return GraphEngine(folder, compilation_config())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"logprobs": 2}], ids=str)
def test_tokens_are_those_of_a_run_without_drafts(source, sampling):
    expected = without_drafts(source).run(PROMPTS, NUM_OUTPUT, **sampling)
    assert engine(source).run(PROMPTS, NUM_OUTPUT, **sampling) == expected
    assert engine(source, 8).run(PROMPTS, NUM_OUTPUT, **sampling) == expected


def test_every_number_has_graphs_of_its_own(source):
    made = engine(source, 2, 8)
    expected = without_drafts(source).run(PROMPTS, NUM_OUTPUT)
    assert made.run(PROMPTS, NUM_OUTPUT) == expected
    kinds = {GraphKind.DECODE: {1, 2, 3, 4}, GraphKind.DRAFT: {1, 2, 3, 4}}
    for kind, q_lens in kinds.items():
        keys = [key for key in made.prepared.graphs.planned if key.kind is kind]
        assert {key.max_q_len for key in keys} == q_lens
    assert any(result.drafted_by_graph for _, result in made.steps)


def test_as_many_drafts_are_verified_as_were_ordered(source):
    made = engine(source)
    made.run(PROMPTS[:1], NUM_OUTPUT)
    ordered = 0
    for descriptor, _ in made.steps:
        metadata = descriptor.spec_decode_metadata
        assert read_int32(metadata.num_draft_tokens).max() <= ordered
        ordered = metadata.num_next_drafts
    assert {step.spec_decode_metadata.num_next_drafts for step, _ in made.steps} == {0, 1, 2, 3}
