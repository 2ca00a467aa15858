"""No field of an OpenEngine request is ignored: each changes the request, or is refused by name."""

import pytest

from protos.common.v1 import sampling_pb2
from protos.openengine.v1.openengine_pb2 import AbortRequest, GenerateRequest
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.openengine.requests import (
    CALLERS_FIELDS,
    REFUSED_FIELDS,
    check_served,
    check_sizes,
    stop_rule,
    to_samples,
)
from tests.support.field_walk import leaf_paths, set_field

VALUES = {
    ("lora_name",): "a",
    ("token_ids", "ids"): [3, 4],
    ("sampling", "temperature"): 0.25,
    ("sampling", "top_p"): 0.5,
    ("sampling", "top_k"): 3,
    ("sampling", "min_p"): 0.5,
    ("sampling", "frequency_penalty"): 0.5,
    ("sampling", "presence_penalty"): 0.25,
    ("sampling", "repetition_penalty"): 1.5,
    ("sampling", "seed"): 12,
    ("sampling", "num_sequences"): 2,
    ("stopping", "max_tokens"): 9,
    ("stopping", "min_tokens"): 2,
    ("stopping", "conditions", "stop_token_id"): 6,
    ("stopping", "ignore_eos"): True,
    ("response", "return_prompt_logprobs"): True,
    ("response", "return_output_logprobs"): True,
    ("kv", "cache_salt"): "tenant",
    ("guided", "json_schema"): "{}",
    ("guided", "regex"): "a",
    ("guided", "ebnf_grammar"): "start: /a/",
    ("guided", "choice", "choices"): ["a"],
    ("guided", "json_object"): None,
}
"""A value for every field that reaches the engine's own request."""
ELSEWHERE = {
    ("request_id",): "names the request",
    ("model",): "checked by the servicer",
    ("stopping", "conditions", "stop_text"): "of StopRule",
    ("stopping", "include_stop_in_output"): "true or refused",
    ("response", "prompt_candidates", "top_n"): "a number of candidates",
    ("response", "prompt_candidates", "token_ids", "ids"): "refused",
    ("response", "prompt_candidates", "all"): "refused",
    ("response", "output_candidates", "top_n"): "a number of candidates",
    ("response", "output_candidates", "token_ids", "ids"): "refused",
    ("response", "output_candidates", "all"): "refused",
}


def message(**fields):
    return GenerateRequest(request_id="r", token_ids={"ids": [1, 2]}, **fields)


def samples(given):
    check_served(given)
    return list(to_samples(given, request_id="r", priority=0))


def is_named(path, names):
    return any(name in names for name in path)


def test_every_field_is_served_refused_or_the_callers_own():
    fields = GenerateRequest.DESCRIPTOR.fields
    paths = [path for path in leaf_paths(GenerateRequest.DESCRIPTOR) if path[0] != "extra"]
    assert "extra" in {field.name for field in fields} & CALLERS_FIELDS.keys()
    for path in paths:
        homes = [path in VALUES, path in ELSEWHERE, is_named(path, REFUSED_FIELDS)]
        assert sum(homes) == 1, path


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path[-1])
def test_a_field_changes_the_engines_request(path):
    changed = message()
    set_field(changed, path, VALUES[path])
    assert samples(changed) != samples(message())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (GenerateRequest(prompt="text"), "prompt"),
        (message(media=[{}]), "media"),
        (message(kv={"session": {"session_id": "s"}}), "session"),
        (message(kv={"bypass_prefix_cache": True}), "bypass_prefix_cache"),
        (message(guided={"structural_tag": "{}"}), "structural_tag"),
        (message(guided={"regex": "a", "backend": "outlines"}), "backend"),
        (message(response={"prompt_logprob_start": 3}), "prompt_logprob_start"),
        (AbortRequest(kv_session={"session_id": "s"}), "kv_session"),
        (AbortRequest(all_requests={}), "all_requests"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_field_that_is_not_served_is_refused_by_its_name(given, name):
    with pytest.raises(UnsupportedError, match=f"^{name} is not served: "):
        check_served(given)


def test_fields_that_are_there_and_0_ask_for_nothing():
    check_served(message(kv={"bypass_prefix_cache": False}, response={"prompt_logprob_start": 0}))


def test_a_message_that_leaves_all_out_has_the_models_defaults():
    [sample] = samples(message())
    assert sample.sampling == sampling_pb2.SamplingParams()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sampling": {"num_sequences": 0}}, "num_sequences is 0"),
        ({"sampling": {"num_sequences": 17}}, "num_sequences is 17"),
        ({"sampling": {"top_k": -1}}, "top_k is -1"),
        ({"stopping": {"include_stop_in_output": False}}, "include_stop_in_output is false"),
        (
            {"response": {"return_output_logprobs": True, "output_candidates": {"all": {}}}},
            "use top_n",
        ),
    ],
)
def test_values_without_an_equivalent_are_refused(fields, why):
    with pytest.raises((InvalidRequestError, UnsupportedError), match=why):
        samples(message(**fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token_ids": {"ids": range(256)}}, "the prompt has 256 tokens; the limit is 255"),
        ({"stopping": {"conditions": [{"stop_token_id": 1}] * 81}}, "conditions has 81 entries"),
        ({"guided": {"choice": {"choices": ["a"] * 1025}}}, "choices has 1025 entries"),
    ],
)
def test_long_lists_are_refused_before_they_are_copied(fields, why):
    with pytest.raises(InvalidRequestError, match=why):
        check_sizes(GenerateRequest(**fields), max_model_len=256)


def test_each_output_has_an_id_and_a_seed_and_the_first_reports_the_prompt():
    given = message(
        sampling={"num_sequences": 3, "seed": 2**64 - 1},
        response={"return_prompt_logprobs": True, "prompt_candidates": {"top_n": 2}},
    )
    told = samples(given)
    assert [sample.request_id for sample in told] == ["r", "r#1", "r#2"]
    assert [sample.sampling.seed for sample in told] == [2**64 - 1, 0, 1]
    assert [sample.sampling.HasField("prompt_logprobs") for sample in told] == [True, False, False]
    assert told[0].sampling.prompt_logprobs == 2


def test_stop_texts_are_a_rule():
    given = message(
        stopping={"min_tokens": 3, "conditions": [{"stop_text": "x"}, {"stop_token_id": 4}]}
    )
    rule = stop_rule(given.stopping)
    assert (rule.texts, rule.min_tokens) == (("x",), 3)
    assert stop_rule(message().stopping) is None
