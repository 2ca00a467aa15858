"""No field of a VllmEngine request is ignored: each changes the request, or is refused by name."""

import re

import pytest
from smg_grpc_proto.generated.vllm_engine_pb2 import GenerateRequest, SamplingParams

from protos.common.v1 import sampling_pb2
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.vllm.requests import (
    CALLERS_FIELDS,
    REFUSED_FIELDS,
    check_served,
    check_sizes,
    stop_rule,
    to_samples,
)
from tests.support.field_walk import set_field

VALUES = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "repetition_penalty": 1.5,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop_token_ids": [6],
    "ignore_eos": True,
    "n": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "seed": 12,
    "logit_bias": {5: 1.5},
    "json_schema": "{}",
    "regex": "a",
    "grammar": "start: /a/",
    "json_object": True,
    "choice": ["a"],
}
"""A value for every field of the sampling that reaches the engine's own request."""
ELSEWHERE = {
    "stop": "of StopRule",
    "skip_special_tokens": "of StopRule",
}
OF_REQUEST = {
    "request_id": "names the request",
    "tokenized": "is the prompt",
    "sampling_params": "the other fields",
    "stream": "the form of the answer",
    "data_parallel_rank": "0 or refused",
}


def message(**sampling):
    return GenerateRequest(
        request_id="r", tokenized={"input_ids": [1, 2]}, sampling_params=SamplingParams(**sampling)
    )


def test_every_field_is_served_refused_or_the_callers_own():
    for kind, own in ((GenerateRequest, OF_REQUEST), (SamplingParams, VALUES | ELSEWHERE)):
        for field in kind.DESCRIPTOR.fields:
            homes = [field.name in each for each in (own, REFUSED_FIELDS, CALLERS_FIELDS)]
            assert sum(homes) == 1, field.name


@pytest.mark.parametrize("name", VALUES)
def test_a_sampling_field_changes_the_engines_request(name):
    changed = message()
    path = ("choice", "choices") if name == "choice" else (name,)
    set_field(changed.sampling_params, path, VALUES[name])
    check_served(changed)
    assert list(to_samples(changed)) != list(to_samples(message()))


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_a_field_that_is_not_served_is_refused_by_its_name(name):
    given = message()
    for part in (given, given.sampling_params):
        field = part.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            continue
        if field.is_repeated:
            getattr(part, name).add()
        elif field.message_type is not None:
            getattr(part, name).SetInParent()
        else:
            setattr(part, name, "x" if field.type == field.TYPE_STRING else 0)
    with pytest.raises(UnsupportedError, match=f"^{name} is not served: "):
        check_served(given)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input_ids": range(256)}, "the prompt has 256 tokens; the limit is 255"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries"),
        ({"stop_token_ids": range(65)}, "stop_token_ids has 65 entries"),
        ({"choice": {"choices": ["a"] * 1025}}, "choice has 1025 entries"),
    ],
)
def test_long_lists_are_refused_before_they_are_copied(changes, why):
    given = message()
    if "input_ids" in changes:
        given.tokenized.input_ids[:] = changes["input_ids"]
    else:
        given = message(**changes)
    with pytest.raises(InvalidRequestError, match=why):
        check_sizes(given, max_model_len=256)


def test_what_a_message_leaves_out_is_neutral():
    [sample] = to_samples(message())
    assert sample.sampling == sampling_pb2.SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        ignore_eos=False,
        min_tokens=0,
    )


def test_each_output_has_an_id_and_a_seed_and_the_first_reports_the_prompt():
    samples = list(to_samples(message(n=3, seed=-2, prompt_logprobs=1)))
    assert [sample.request_id for sample in samples] == ["r", "r#1", "r#2"]
    assert [sample.sampling.seed for sample in samples] == [2**64 - 2, 2**64 - 1, 0]
    told = [sample.sampling.HasField("prompt_logprobs") for sample in samples]
    assert told == [True, False, False]


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"n": 17}, "n is 17; it must be 1 to 16"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias is -1"),
    ],
)
def test_a_value_that_the_engine_has_not_is_refused(sampling, why):
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        list(to_samples(message(**sampling)))


def test_another_rank_and_an_unknown_field_are_refused():
    given = message()
    given.data_parallel_rank = 0
    check_served(given)
    given.data_parallel_rank = 1
    with pytest.raises(UnsupportedError, match="data_parallel_rank is 1"):
        check_served(given)
    with pytest.raises(UnsupportedError, match="field 111"):
        check_served(GenerateRequest.FromString(b"\xf8\x06\x01"))


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (["a"] * 17, "stop has 17 strings"),
        ([""], "has 0 bytes"),
        (["a" * 257], "has 257 bytes"),
    ],
)
def test_stop_strings_are_bounded(stop, why):
    with pytest.raises(InvalidRequestError, match=why):
        stop_rule(SamplingParams(stop=stop))
