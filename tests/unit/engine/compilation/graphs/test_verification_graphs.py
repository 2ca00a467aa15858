"""Whole graphs of steps that verify drafts: keyed by requests and k + 1 query tokens of each."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from services.engine.batch import FallbackReason
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 14
RAN_GRAPH = FallbackReason.FALLBACK_REASON_UNSPECIFIED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return GraphEngine(folder, compilation_config()).run(PROMPTS, NUM_OUTPUT)


def engine(folder, num_speculative_tokens, *sizes, mode=CUDAGraphMode.FULL_DECODE_ONLY, **options):
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    return GraphEngine(folder, config, num_speculative_tokens=num_speculative_tokens, **options)


def verifications(engine):
    """Why each step that only verified drafts ran without a graph, if it did."""
    return [
        reason
        for (descriptor, _), reason in zip(engine.steps, engine.reasons, strict=True)
        if not descriptor.context.is_prefill
    ]


@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
def test_verifications_run_whole_graphs(folder, expected, num_speculative_tokens):
    speculating = engine(folder, num_speculative_tokens, 1, 2, 4, 8)
    outcomes = speculating.capture()
    assert [outcome.fault for outcome in outcomes] == [""] * 8
    q_len = 1 + num_speculative_tokens
    assert [
        (each.key.kind, each.key.graph_bs, each.key.max_q_len, each.key.num_tokens)
        for each in outcomes
    ] == [
        (kind, size, q_len, size * q_len)
        for kind in (GraphKind.DECODE, GraphKind.DRAFT)
        for size in (8, 4, 2, 1)
    ]
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    reasons = verifications(speculating)
    assert len(reasons) > 2
    assert set(reasons) == {RAN_GRAPH}
