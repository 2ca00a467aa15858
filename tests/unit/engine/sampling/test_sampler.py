import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.operands.draws import NO_TOKEN
from services.engine.sampling.sampler import greedy, sample
from tests.support.sampling_rows import probabilities, token_choice

VOCAB = 50
PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 7.5},
    {"top_k": 1},
    {"top_k": 12},
    {"top_k": VOCAB * 3},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 0.999},
    {"top_k": 20, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def random_logits(num_rows, *, seed=0, vocab_size=VOCAB):
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def transformers_probabilities(logits, params):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.get("temperature", 1.0))])
    if params.get("top_k"):
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1) < 1:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if params.get("min_p"):
        warpers.append(MinPLogitsWarper(params["min_p"]))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits[None]).softmax(-1)[0]


def test_a_mixed_batch_has_the_distributions_of_transformers():
    logits = random_logits(len(PARAMS))
    ours = probabilities(logits, token_choice(PARAMS))
    theirs = [transformers_probabilities(*pair) for pair in zip(logits, PARAMS, strict=True)]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(0.05, 5),
    st.integers(0, VOCAB + 5),
    st.floats(0.01, 1),
    st.floats(0, 0.9),
)
def test_any_parameters_have_the_distribution_of_transformers(seed, temperature, k, p, min_p):
    logits = random_logits(1, seed=seed)
    params = {"temperature": temperature, "top_k": k, "top_p": p, "min_p": min_p}
    ours = probabilities(logits, token_choice([params]))[0]
    theirs = transformers_probabilities(logits[0], params)
    # Where a sum meets top_p to the last bit, rounding decides about the token there, and about
    # tokens whose probabilities are too small to move the sum.
    disputed = torch.maximum(ours, theirs)[(ours > 0) != (theirs > 0)]
    num_disputed = int((disputed > 1e-6).sum())
    assert num_disputed <= 1
    if num_disputed == 0:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


def test_a_top_p_of_almost_one_keeps_what_a_float32_sum_can_distinguish():
    params = {"temperature": 0.25, "top_p": 0.9999999999999999}
    logits = random_logits(1, seed=0)
    ours = probabilities(logits, token_choice([params]))[0]
    theirs = transformers_probabilities(logits[0], params)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("params", PARAMS)
def test_draws_follow_the_distribution(params):
    count = 4000
    logits = random_logits(1, seed=3).expand(count, -1)
    rows = [params | {"seed": 11, "position": position} for position in range(count)]
    choice = token_choice(rows)
    drawn = torch.bincount(sample(logits, choice), minlength=VOCAB).float()
    expected = probabilities(logits[:1], token_choice([params]))[0] * count
    assert drawn[expected == 0].sum() == 0
    is_common = expected >= 5
    # Rare tokens are counted as one, so that every bin's count is nearly normal.
    drawn = torch.cat([drawn[is_common], drawn[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    chi_square = ((drawn - expected) ** 2 / expected.clamp(min=1)).sum()
    degrees = len(drawn) - 1
    assert chi_square <= degrees + 5 * (2 * max(degrees, 1)) ** 0.5


def test_greedy_rows_in_a_mixed_batch_are_the_argmax_and_ties_go_to_the_lowest_id():
    logits = random_logits(3)
    logits[:, [7, 30, 41]] = 99.0
    choice = token_choice([{"temperature": 0.0, "top_k": 3}, {}, {"temperature": 0.0}])
    tokens = sample(logits, choice).tolist()
    assert tokens[::2] == [7, 7]
    assert tokens[1] in (7, 30, 41)
    assert greedy(logits).tolist() == [7, 7, 7]


def test_a_row_draws_the_same_token_beside_any_other_row():
    rows = [
        {"temperature": 1.0 + index / 9, "top_k": index % 4 * 10, "seed": index, "position": 5}
        for index in range(20)
    ]
    logits = random_logits(20)
    together = sample(logits, token_choice(rows)).tolist()
    alone = [sample(logits[i : i + 1], token_choice([row])).item() for i, row in enumerate(rows)]
    reversed_ = sample(logits.flip(0), token_choice(rows[::-1])).flip(0).tolist()
    assert together == alone == reversed_
    assert len(set(together)) > 5


def test_other_seeds_and_other_positions_draw_other_tokens():
    logits = torch.zeros(64, VOCAB)
    seeds = sample(logits, token_choice([{"seed": i} for i in range(64)]))
    positions = sample(logits, token_choice([{"position": i} for i in range(64)]))
    assert len(seeds.unique()) > 20
    assert len(positions.unique()) > 20


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 1e-9},
        {"top_p": 1e-60},
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 1e-40},
    ],
)
def test_the_strictest_truncation_keeps_the_most_likely_token(params):
    logits = random_logits(5)
    choice = token_choice([params | {"seed": seed} for seed in range(5)])
    assert torch.equal(sample(logits, choice), logits.argmax(-1))
    assert torch.isfinite(probabilities(logits, choice)).all()


def test_the_only_token_that_is_not_masked_is_drawn_whatever_the_parameters():
    logits = torch.full((len(PARAMS), VOCAB), -torch.inf)
    logits[:, 31] = -5.0
    assert sample(logits, token_choice(PARAMS)).tolist() == [31] * len(PARAMS)


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    for params in ({"top_k": 2}, {"top_k": 2, "top_p": 0.99}):
        kept = probabilities(logits, token_choice([params]))[0] > 0
        assert kept.tolist() == [True, False, True, True, False]


def test_a_token_without_probability_is_never_drawn_at_either_end():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(5000, -1)
    rows = [{"seed": seed, "position": seed} for seed in range(5000)]
    assert (sample(logits, token_choice(rows)) == 1).all()


def test_a_greedy_row_may_have_a_larger_top_k_than_the_drawn_ones():
    choice = token_choice([{"temperature": 0.0, "top_k": 40}, {"top_k": 2}])
    logits = random_logits(2)
    tokens = sample(logits, choice)
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] in logits[1].topk(2).indices


def test_broken_logits_name_no_token():
    logits = torch.full((2, VOCAB), torch.nan)
    assert sample(logits, token_choice([{}, {"top_k": 3}])).tolist() == [NO_TOKEN] * 2
    assert greedy(logits).tolist() == [NO_TOKEN] * 2
