"""The kernels that read and choose a step's tokens, and write its block ids."""

import pytest
import torch

from models.operands.draws import NO_TOKEN
from models.ops.elementwise.table_entries import write_entries
from models.ops.sampling.step_tokens import choose_greedily, last_tokens
from tests.support.step_tokens_case import check_choice, check_last_tokens

pytestmark = pytest.mark.gpu


def test_the_last_token_of_each_sequence_is_found():
    check_last_tokens(last_tokens, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_logits", [1, 7, 127, 32_000, 151_936])
@pytest.mark.parametrize("num_rows", [1, 3, 17, 300])
def test_the_most_likely_token_is_chosen_and_written(num_rows, num_logits, dtype):
    check_choice(choose_greedily, num_rows, num_logits, dtype=dtype, device="cuda")


def test_rows_without_a_finite_logit_get_no_token_and_the_table_one_that_exists():
    for value in (float("-inf"), float("nan"), float("inf")):
        logits = torch.full((3, 100), value, device="cuda")
        tokens = torch.ones(3, 2, dtype=torch.int32, device="cuda")
        rows = torch.arange(3, dtype=torch.int32, device="cuda")
        chosen = choose_greedily(logits, tokens, rows, torch.zeros_like(rows))
        assert chosen.tolist() == [NO_TOKEN] * 3
        assert tokens.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("num_writes", [1, 255, 256, 1000])
def test_block_ids_are_written_where_they_belong_and_nowhere_else(num_writes):
    table = torch.zeros(300, 7, dtype=torch.int32, device="cuda")
    indices = torch.randperm(table.numel(), device="cuda")[:num_writes].int()
    values = torch.arange(1, num_writes + 1, dtype=torch.int32, device="cuda")
    expected = table.clone()
    expected.view(-1)[indices.long()] = values
    write_entries(table, torch.stack([indices, values]))
    assert torch.equal(table, expected)
