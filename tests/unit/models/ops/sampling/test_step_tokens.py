import torch

from models.operands.draws import NO_TOKEN
from models.ops.sampling.step_tokens import choose_greedily, last_tokens
from tests.support.step_tokens_case import check_choice, check_last_tokens


def test_the_last_token_of_each_sequence_is_found():
    check_last_tokens(last_tokens, device="cpu")


def test_the_most_likely_token_is_chosen_and_written():
    for num_rows, num_logits in [(1, 1), (3, 7), (5, 127), (2, 32_000)]:
        check_choice(choose_greedily, num_rows, num_logits, dtype=torch.float32, device="cpu")


def test_the_lowest_of_equal_tokens_is_chosen():
    logits = torch.zeros(2, 9)
    tokens = torch.zeros(2, 3, dtype=torch.int32)
    rows, positions = torch.tensor([0, 1]).int(), torch.tensor([0, 2]).int()
    assert choose_greedily(logits, tokens, rows, positions).tolist() == [0, 0]


def test_rows_without_a_finite_logit_get_no_token_and_the_table_one_that_exists():
    for value in (float("-inf"), float("nan"), float("inf")):
        logits = torch.full((2, 9), value)
        tokens = torch.ones(2, 3, dtype=torch.int32)
        rows, positions = torch.tensor([0, 1]).int(), torch.tensor([0, 2]).int()
        assert choose_greedily(logits, tokens, rows, positions).tolist() == [NO_TOKEN] * 2
        assert tokens.tolist() == [[0, 1, 1], [1, 1, 0]]
