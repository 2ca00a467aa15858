"""No field of a request to the engine is ignored: each changes the request, or is refused."""

import dataclasses
from contextlib import suppress

import pytest

from protos.engine.v1.engine_pb2 import GenerateRequest, Submit
from services.engine.batch import row_assignment
from services.engine.edge.request_reader import RequestReader
from services.engine.errors import EngineError
from services.engine.request import Request, SamplingParams
from tests.support.engine_harness import RecordingSink, model_folder
from tests.support.field_walk import leaf_paths, set_field

VALUES = {
    "handle": 9,
    "request_id": "another",
    "prompt_token_ids": [7, 8],
    "priority": 3,
    "num_resumed_tokens": 1,
    "timeout_ms": 5000,
    "cache_salt": "tenant",
    "caller": "somebody",
    "adapter": "first",
    "model": "another",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "sampling.temperature": 0.25,
    "sampling.top_k": 3,
    "sampling.top_p": 0.5,
    "sampling.min_p": 0.5,
    "sampling.repetition_penalty": 1.5,
    "sampling.frequency_penalty": 0.5,
    "sampling.presence_penalty": 0.5,
    "sampling.seed": 12,
    "sampling.logit_bias": {5: 1.5},
    "sampling.stop_token_ids": [6],
    "sampling.ignore_eos": True,
    "sampling.min_tokens": 2,
    "sampling.max_tokens": 3,
    "sampling.logprobs": 0,
    "sampling.prompt_logprobs": 0,
    "sampling.num_speculative_tokens": 1,
    "sampling.allowed_token_ids": [5],
    "sampling.forbidden_sequences.token_ids": [5, 6],
    "sampling.structured_output.json_schema": "{}",
    "sampling.structured_output.json_object": True,
    "sampling.structured_output.regex": "a",
    "sampling.structured_output.lark": "start: /a/",
    "sampling.structured_output.choice.texts": ["a"],
    "sampling.structured_output.tagged.begin": "a",
    "sampling.structured_output.tagged.separator": "a",
    "sampling.structured_output.tagged.end": "a",
    "sampling.structured_output.tagged.triggers": ["a"],
    "sampling.structured_output.tagged.stop_after_first": True,
    "sampling.structured_output.tagged.has_text_between": True,
    "sampling.structured_output.tagged.tags.begin": "a",
    "sampling.structured_output.tagged.tags.json_schema": "{}",
    "sampling.structured_output.tagged.tags.end": "a",
    "sampling.structured_output.tagged.tags.pairs.begin": "a",
    "sampling.structured_output.tagged.tags.pairs.assign": "a",
    "sampling.structured_output.tagged.tags.pairs.end": "a",
    "sampling.structured_output.tagged.tags.pairs.separator": "a",
    "sampling.structured_output.tagged.tags.pairs.bare_strings": True,
    "sampling.structured_output.tagged.tags.pairs.python_names": True,
    "sampling.structured_output.tagged.tags.pairs.quote": "'",
    "sampling.structured_output.tagged.tags.pairs.elements": True,
    "sampling.structured_output.begun": "a",
    "sampling.structured_output.preamble.begin": "a",
    "sampling.structured_output.preamble.end": "a",
    "sampling.structured_output.preamble.max_tokens": 0,
    "pool": True,
    "images.digest": b"\1" * 32,
    "images.offset": 1,
    "images.num_tokens": 1,
}
"""A value for every field that is not what its absence means. A new field needs one."""

WORKER_HEARS_NOT = {
    "end_token_ids": "the scheduler ends the request; with min_tokens the worker hears of them",
    "max_tokens": "the scheduler orders no step past it",
    "prompt_logprobs": "each step names the requests that want them",
    "num_speculative_tokens": "each step names its drafts",
    "forbidden_sequences": "the scheduler sends masks",
    "allowed_tokens": "the scheduler sends masks",
}


def paths(message_class):
    return [".".join(path) for path in leaf_paths(message_class.DESCRIPTOR)]


def read(message):
    reader = RequestReader(model_folder(eos_token_ids=frozenset({2})))
    sink = RecordingSink()
    if isinstance(message, Submit):
        request = reader.from_submit(message, sink, reader.session_images())
    else:
        request = reader.from_generate(message, sink, timeout_s=None)
    return {
        field.name: getattr(request, field.name)
        for field in dataclasses.fields(Request)
        if field.name not in ("sink", "arrival_s")
    }


def baseline(message_class):
    message = message_class(request_id="r", sampling={"seed": 1, "max_tokens": 30})
    value = b"\1\0\0\0" if message_class is Submit else [1]
    set_field(message, ("prompt_token_ids",), value)
    return message


@pytest.mark.parametrize(
    ("message_class", "path"),
    [(kind, path) for kind in (Submit, GenerateRequest) for path in paths(kind)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_field_changes_the_request_or_is_refused(message_class, path):
    message = baseline(message_class)
    value = VALUES[path]
    if message_class is Submit and path == "prompt_token_ids":
        value = b"\7\0\0\0"
    set_field(message, tuple(path.split(".")), value)
    ordinary = read(baseline(message_class))
    with suppress(EngineError):  # a refusal is an answer too
        assert read(message) != ordinary


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_sampling_parameter_reaches_the_worker_or_is_the_schedulers(name):
    neutral = SamplingParams(seed=1, max_tokens=30)
    values = {"end_token_ids": frozenset({6}), "max_tokens": 3, "logit_bias": ((5, 1.5),)}
    values |= {"banned_token_ids": frozenset({5}), "forbidden_sequences": ((5, 6),)}
    values["allowed_tokens"] = b"\1"
    value = values.get(name, VALUES.get(f"sampling.{name}"))

    def told(sampling):
        return row_assignment(row=0, token_ids=[1], num_prompt_tokens=1, sampling=sampling)

    changed = dataclasses.replace(neutral, **{name: value})
    assert changed != neutral
    assert (told(changed) != told(neutral)) == (name not in WORKER_HEARS_NOT)
