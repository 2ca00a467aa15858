"""From protobuf to requests: every default and every refusal."""

import math

import numpy as np
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import GenerateRequest, Submit
from services.engine.checkpoint.model_folder import DefaultSampling
from services.engine.edge.request_reader import RequestReader, check_known
from services.engine.edge.session_images import SessionImages
from services.engine.errors import InvalidRequestError, UnknownModelError, UnsupportedError
from tests.support.engine_harness import MAX_MODEL_LEN, RecordingSink, model_folder
from tests.support.token_masks import mask_of

UNKNOWN_FIELD = b"\xf8\x06\x01"  # number 111, varint 1


def pack(token_ids):
    return np.array(token_ids, "<u4").tobytes()


def read(sampling=None, *, prompt=(1, 2, 3), model=None, **fields):
    submit = Submit(handle=4, request_id="r", prompt_token_ids=pack(prompt), **fields)
    if sampling is not None:
        submit.sampling.CopyFrom(SamplingParams(**sampling))
    return RequestReader(model or model_folder()).from_submit(
        submit, RecordingSink(), SessionImages(max_bytes=0)
    )


def runs(*sequences):
    return [{"token_ids": sequence} for sequence in sequences]


def test_a_submission_becomes_a_request():
    request = read(priority=3, cache_salt="s", timeout_ms=1500)
    assert (request.request_id, request.handle, request.priority) == ("r", 4, 3)
    assert (request.prompt_token_ids, request.cache_salt) == ([1, 2, 3], "s")
    assert request.deadline_s == pytest.approx(request.arrival_s + 1.5)


def test_the_tokens_of_another_engine_are_output_and_no_prompt():
    request = read({"max_tokens": 10_000}, prompt=(1, 2, 3, 8, 9), num_resumed_tokens=2)
    assert (request.prompt_token_ids, request.resumed_token_ids) == ([1, 2, 3], [8, 9])
    assert request.token_ids == [1, 2, 3, 8, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)
    assert request.sampling.max_tokens == MAX_MODEL_LEN - 3


@pytest.mark.parametrize("num_resumed_tokens", [3, 4, 2**32 - 1])
def test_a_request_without_prompt_cannot_be_resumed(num_resumed_tokens):
    with pytest.raises(InvalidRequestError, match=f"num_resumed_tokens is {num_resumed_tokens}"):
        read(num_resumed_tokens=num_resumed_tokens)


def test_no_timeout_means_no_deadline():
    assert read().deadline_s is None


def test_silence_means_the_models_defaults():
    defaults = DefaultSampling(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    sampling = read(model=model_folder(default_sampling=defaults)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    assert sampling.repetition_penalty == 1.1
    assert sampling.max_tokens == MAX_MODEL_LEN - 3
    assert sampling.logprobs is None


def test_zero_is_a_value_and_not_the_default():
    defaults = DefaultSampling(temperature=0.6, top_k=20)
    given = {"temperature": 0, "top_k": 0, "seed": 0, "logprobs": 0}
    sampling = read(given, model=model_folder(default_sampling=defaults)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 0, 0)
    assert sampling.logprobs == 0


def test_a_seed_is_drawn_where_none_is_given():
    assert read().sampling.seed != read().sampling.seed


def test_end_ids_are_the_models_and_the_requests():
    model = model_folder(eos_token_ids=frozenset({9}))
    assert read({"stop_token_ids": [5]}, model=model).sampling.end_token_ids == {5, 9}
    ignoring = read({"stop_token_ids": [5], "ignore_eos": True}, model=model)
    assert ignoring.sampling.end_token_ids == {5}


def test_max_tokens_is_bounded_by_the_context():
    assert read({"max_tokens": 10_000}).sampling.max_tokens == MAX_MODEL_LEN - 3


def test_allowed_tokens_are_bits():
    allowed = read({"allowed_token_ids": [0, 9, 9, 999]}).sampling.allowed_tokens
    assert allowed == mask_of([0, 9, 999], 1000)
    assert read().sampling.allowed_tokens is None


def test_a_forbidden_sequence_of_one_token_is_a_bias_and_makes_longer_ones_needless():
    forbidden = runs([5], [7, 8], [7, 5, 8], [7, 8])
    sampling = read({"forbidden_sequences": forbidden, "logit_bias": {5: 2.0, 6: 1.0}}).sampling
    assert sampling.forbidden_sequences == ((7, 8),)
    assert sampling.biases == ((5, -math.inf), (6, 1.0))
    assert sampling.has_logit_edits


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"stop_token_ids": [1000]}, "stop_token_ids has the token id 1000; ids are below 1000"),
        ({"stop_token_ids": range(65)}, "stop_token_ids has 65 entries; the limit is 64"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias has the token id 1000"),
        ({"logit_bias": {1: 101.0}}, "101.0"),
        ({"allowed_token_ids": [5, 1000]}, "allowed_token_ids has the token id 1000"),
        ({"allowed_token_ids": [5] * 65_537}, "allowed_token_ids has 65537 entries; the limit is"),
        ({"forbidden_sequences": [{}]}, "forbidden_sequences has an empty sequence"),
        ({"forbidden_sequences": runs([1, 1000])}, "forbidden_sequences has the token id 1000"),
        ({"forbidden_sequences": runs([1] * 2049)}, "forbidden_sequences has over 2048 tokens"),
        ({"forbidden_sequences": runs([1], [2]), "allowed_token_ids": [2, 1]}, "has each of the"),
        ({"forbidden_sequences": runs(*([i] for i in range(1000)))}, "has every token"),
        (
            {
                "forbidden_sequences": runs(*([i] for i in range(500))),
                "logit_bias": dict.fromkeys(range(400, 1000), 1.0),
            },
            "logit_bias has 1100 entries, forbidden sequences of one token included",
        ),
    ],
)
def test_sampling_out_of_range_is_refused_with_value_and_limit(sampling, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(sampling)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "the prompt is empty"),
        (range(MAX_MODEL_LEN), "the prompt has 256 tokens; the limit is 255"),
        ((1, 1000), "prompt_token_ids has the token id 1000; ids are below 1000"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(prompt=prompt)


def test_a_prompt_of_broken_bytes_is_refused():
    submit = Submit(request_id="r", prompt_token_ids=b"12345")
    with pytest.raises(InvalidRequestError, match="has 5 bytes"):
        RequestReader(model_folder()).from_submit(
            submit, RecordingSink(), SessionImages(max_bytes=0)
        )


@pytest.mark.parametrize(("name", "message"), [("", "is empty"), ("x" * 257, "257 characters")])
def test_a_bad_request_id_is_refused(name, message):
    submit = Submit(request_id=name, prompt_token_ids=pack([1]))
    with pytest.raises(InvalidRequestError, match=message):
        RequestReader(model_folder()).from_submit(
            submit, RecordingSink(), SessionImages(max_bytes=0)
        )


def test_a_salt_over_its_limit_is_refused():
    submit = Submit(request_id="r", prompt_token_ids=pack([1]), cache_salt="x" * 129)
    with pytest.raises(InvalidRequestError, match="cache_salt has 129 characters"):
        RequestReader(model_folder()).from_submit(
            submit, RecordingSink(), SessionImages(max_bytes=0)
        )


class TestUnknownFields:
    def test_at_the_top_are_refused(self):
        message = Submit.FromString(Submit(handle=1).SerializeToString() + UNKNOWN_FIELD)
        with pytest.raises(UnsupportedError, match="Submit has the field 111"):
            check_known(message)

    def test_in_a_nested_message_are_refused(self):
        submit = Submit(sampling=SamplingParams.FromString(UNKNOWN_FIELD))
        with pytest.raises(UnsupportedError, match="SamplingParams has the field 111"):
            check_known(submit)

    def test_known_fields_of_every_kind_pass(self):
        check_known(
            Submit(sampling=SamplingParams(logit_bias={1: 2.0}, stop_token_ids=[1], seed=0))
        )


class TestGenerate:
    def read(self, timeout_s=None, **fields):
        message = GenerateRequest(**{"prompt_token_ids": [1], **fields})
        return RequestReader(model_folder()).from_generate(
            message, RecordingSink(), timeout_s=timeout_s
        )

    def test_a_name_is_drawn_where_none_is_given(self):
        assert self.read().request_id != self.read().request_id

    def test_the_served_model_may_be_named(self):
        assert self.read(model="fake").prompt_token_ids == [1]

    def test_another_model_is_refused(self):
        with pytest.raises(UnknownModelError, match="'other' is not served here; 'fake' is"):
            self.read(model="other")

    def test_the_calls_time_limit_is_the_requests(self):
        request = self.read(timeout_s=2.0)
        assert request.deadline_s == request.arrival_s + 2.0


def test_the_default_sampling_shown_sets_every_scalar_but_five():
    shown = RequestReader(model_folder()).default_sampling()
    unset = {
        field.name
        for field in SamplingParams.DESCRIPTOR.fields
        if field.message_type is None
        if field.has_presence and not shown.HasField(field.name)
    }
    assert unset == {
        "seed",
        "max_tokens",
        "logprobs",
        "prompt_logprobs",
        "num_speculative_tokens",
    }


def test_prompt_logprobs_are_bounded_by_what_one_message_carries():
    reader = RequestReader(model_folder(max_model_len=200_000))
    sampling = SamplingParams(prompt_logprobs=1)
    fits = GenerateRequest(prompt_token_ids=[1] * 50_000, sampling=sampling)
    assert reader.from_generate(fits, RecordingSink(), timeout_s=None).sampling.prompt_logprobs == 1
    fits.prompt_token_ids.append(1)
    with pytest.raises(InvalidRequestError, match="100002 log-probabilities; the limit is 100000"):
        reader.from_generate(fits, RecordingSink(), timeout_s=None)
