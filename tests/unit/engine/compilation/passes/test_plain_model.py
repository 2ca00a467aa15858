"""Models written by other conventions get every fusion."""

import pytest
import torch

from tests.support.compiled_models import compile_at
from tests.support.paged_runner import PagedRunner
from tests.support.plain_model import GATES, NORMS, NUM_LAYERS, SUMS, PlainModel

FUSED = {
    "linear_gate": NUM_LAYERS,
    "linear_residual": 2 * NUM_LAYERS,
    "all_reduce_norm": 0,
    "residual_norm": 0,
    "norm_linear": 2 * NUM_LAYERS,
    "qk_norm_rope_cache": NUM_LAYERS,
    "multi_stream": 0,
}
PROMPT = [5, 17, 3, 44, 2, 9, 9, 31]


def logits(model):
    runner = PagedRunner(model)
    return runner.run(runner.add(PROMPT), 5)


def fused_matches(stats):
    return {name: stats.pass_matches[name] for name in FUSED}


SPELLINGS = [
    (NORMS[0], GATES[0], SUMS[0], False),
    (NORMS[1], GATES[1], SUMS[1], True),
    (NORMS[2], GATES[2], SUMS[2], False),
    (NORMS[3], GATES[0], SUMS[3], True),
]


@pytest.mark.parametrize(("norm", "gate", "add", "has_head_norms"), SPELLINGS)
def test_every_spelling_is_fused_and_computes_the_same(norm, gate, add, has_head_norms):
    model = PlainModel(norm, gate, add, has_head_norms=has_head_norms, bias=has_head_norms)
    expected = logits(model)
    stats = compile_at(3)(model)
    assert fused_matches(stats) == FUSED
    torch.testing.assert_close(logits(model), expected)
