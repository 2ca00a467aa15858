"""Ranges of sampling parameters, and a request's count of itself."""

import math

import pytest

from services.engine.errors import InvalidRequestError
from services.engine.request import MIN_REPETITION_PENALTY
from tests.support.requests import make_request, make_sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", tuple((i, 0.0) for i in range(1025))),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=field):
        make_sampling(**{field: value})


def test_the_least_repetition_penalty_is_taken():
    assert make_sampling(repetition_penalty=MIN_REPETITION_PENALTY).has_logit_edits


def test_temperature_zero_is_greedy():
    assert make_sampling(temperature=0.0).is_greedy
    assert not make_sampling(temperature=0.5).is_greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"logit_bias": ((1, 2.0),)},
        {"min_tokens": 1, "end_token_ids": [2]},
    ],
)
def test_penalties_bias_and_min_tokens_edit_logits(fields):
    assert make_sampling(**fields).has_logit_edits


def test_neutral_sampling_edits_no_logits():
    assert not make_sampling(end_token_ids=[2]).has_logit_edits
    assert not make_sampling(min_tokens=1).has_logit_edits


def test_a_request_counts_its_output_after_the_prompt():
    request = make_request([1, 2, 3])
    assert request.num_output_tokens == 0
    request.token_ids.append(4)
    assert request.num_output_tokens == 1
    assert request.prompt_token_ids == [1, 2, 3]
