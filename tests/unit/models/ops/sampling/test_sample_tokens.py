import pytest
import torch

from models.ops.sampling.sample_tokens import NO_TOKEN, kept_weights
from models.ops.sampling.token_weights import WEIGHT_BITS, scale_of, weights_at
from services.engine.sampling.sampler import sample
from tests.support.sampling_kernels import (
    DTYPES,
    PARAMS,
    mixed_choice,
    odd_logits,
    random_logits,
    reference_tokens,
)
from tests.support.sampling_rows import token_choice


def test_weights_are_exponentials_in_units_of_the_largest():
    depths = torch.linspace(0, 25, 1000)[None]
    for temperature in (0.5, 1.0, 3.0):
        weights = weights_at(depths, scale_of(torch.tensor([temperature])))
        exact = (-depths.double() / temperature).exp() * 2.0**WEIGHT_BITS
        assert (weights - exact).abs().max() < 2.0 ** (WEIGHT_BITS - 22)
        is_common = exact > 2.0**24
        relative = ((weights - exact) / exact)[is_common].abs()
        assert relative.max() < 1e-5
        assert weights[0, 0] == 2**WEIGHT_BITS


def test_the_largest_vocabulary_of_equal_tokens_does_not_overflow():
    weights = weights_at(torch.zeros(1, 2**19 - 1), torch.ones(1))
    assert weights.sum() == (2**19 - 1) << WEIGHT_BITS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 127, 32_000])
def test_tokens_are_kept_ones_in_every_dtype_and_size(vocab_size, dtype):
    logits = random_logits(len(PARAMS), vocab_size, dtype)
    choice = mixed_choice(len(PARAMS))
    tokens = reference_tokens(logits, choice)
    weights = kept_weights(logits, choice.temperature, choice.top_k, choice.top_p, choice.min_p)
    assert (weights.gather(1, tokens[:, None]) > 0).all()
    assert torch.equal(tokens, reference_tokens(logits.float(), choice))
    is_greedy = choice.temperature == 0
    assert torch.equal(tokens[is_greedy], logits.argmax(-1)[is_greedy])


@pytest.mark.parametrize("name", odd_logits(9))
def test_odd_logits_name_tokens_that_exist_unless_none_is_finite(name):
    logits = odd_logits(50)[name]
    tokens = reference_tokens(logits, mixed_choice(len(PARAMS)))
    is_sound = logits.amax(-1).isfinite()
    assert ((tokens >= 0) & (tokens < 50))[is_sound].all()
    assert (tokens == NO_TOKEN)[~is_sound].all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_whose_largest_logit_means_nothing_gets_no_token_and_its_neighbour_one(value):
    logits = torch.zeros(2, 50)
    logits[0, 7] = value
    logits[1, 7] = 1.0
    for params in PARAMS:
        tokens = sample(logits, token_choice([params, {"temperature": 0.0}]))
        assert tokens.tolist() == [NO_TOKEN, 7]


def test_top_p_is_of_what_top_k_left_with_its_ties():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0]])

    def kept(top_k, top_p):
        one = torch.ones(1)
        weights = kept_weights(
            logits, one, torch.tensor([top_k]), torch.tensor([top_p]), torch.zeros(1)
        )
        return (weights[0] > 0).nonzero().flatten().tolist()

    assert kept(2, 1.0) == [0, 1, 2]
    assert kept(2, 0.57) == [0]
    assert kept(2, 0.58) == [0, 1, 2]
    assert kept(0, 0.57) == [0, 1, 2]
