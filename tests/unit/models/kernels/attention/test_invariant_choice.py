"""Attention to what an index chooses in batch-invariant mode, in Triton's interpreter."""

import pytest
import torch

from models.operands.ordered_choice import ordered_choice
from tests.support.programs import run_interpreted

BLOCKS = """
from dataclasses import replace

import torch
torch.set_num_threads(1)
from models.batch_invariance import use_batch_invariance
from models.ops.attention import block_sparse_attention as operator
from tests.support.attention_case import Heads
from tests.support.block_sparse_case import make_block_sparse_case
from tests.support.tolerances import assert_rows_close

operator.has_kernels = lambda device: True
HEADS = Heads(num_heads=6, num_kv_heads=3, head_dim=24)
BATCH = [1, 7, 20, 1], [5, 7, 90, 120]
cases = [make_block_sparse_case(*BATCH, HEADS, dtype=dtype)
         for dtype in (torch.float32, torch.float16)]
# Every block has the same score.
alike = cases[0].plain.cache.index_keys
cache = replace(cases[0].plain.cache, index_keys=torch.zeros_like(alike))
cases.append(replace(cases[0], plain=replace(cases[0].plain, cache=cache),
                     index_k=torch.zeros_like(cases[0].index_k)))
for case in cases:
    expected = case.run()
    use_batch_invariance(is_on=True)
    whole = case.run()
    # Equal scores may be chosen otherwise.
    if case is not cases[-1]:
        assert_rows_close(whole, expected)
    for token in range(0, len(whole), 3):
        assert torch.equal(case.alone(token).run()[0], whole[token]), token
    use_batch_invariance(is_on=False)
"""


TOKENS = """
import torch
torch.set_num_threads(1)
from models.batch_invariance import use_batch_invariance
from models.ops.attention import latent_attention as operator
from tests.support.interpreter_rounding import round_exactly
from tests.support.latent_case import make_latent_case
from tests.support.tolerances import assert_rows_close

round_exactly()
operator.has_kernels = lambda device: True
SIZES = {"num_heads": 5, "latent_dim": 48, "rope_dim": 8, "has_transform": False}
for options in (
    {"dtype": torch.float32, "has_sinks": True}, {"dtype": torch.float16},
    {"dtype": torch.float32, "has_fp8_cache": True},
):
    case = make_latent_case([1, 7, 20, 1], [5, 7, 90, 33], top_k=19, **SIZES, **options)
    expected = case.run()
    use_batch_invariance(is_on=True)
    whole = case.run()
    assert_rows_close(whole, expected)
    for token in range(0, len(whole), 3):
        assert torch.equal(case.alone(token).run()[0], whole[token]), token
    use_batch_invariance(is_on=False)
"""


@pytest.mark.families
@pytest.mark.parametrize("program", [BLOCKS, TOKENS], ids=["blocks", "tokens"])
def test_a_token_has_the_bits_that_it_has_alone(program):
    run_interpreted(program)


def test_of_equal_scores_the_first_are_chosen_and_numbers_rise():
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0], [-torch.inf, 0.0, 0.0, 0.0, 0.0]])
    assert ordered_choice(scores, 3).tolist() == [[1, 2, 3], [1, 2, 3]]
