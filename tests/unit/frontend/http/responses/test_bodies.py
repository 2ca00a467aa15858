"""Bodies of requests for responses: nulls, unknown fields and nonsense, at every depth."""

import copy
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.body import Body
from services.frontend.http.responses import schema
from services.frontend.http.responses.calls import read_response

BODY = {
    "model": "m",
    "input": [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Short."}],
            "content": [{"type": "reasoning_text", "text": "Long."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I call.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"default": None}, "strict": True}],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    },
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"default": None}}},
    "reasoning": {"effort": "low"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "metadata": {"a": "b"},
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
OPTIONAL = {
    name
    for model in vars(schema).values()
    if isinstance(model, type) and issubclass(model, Body)
    for name, field in model.model_fields.items()
    if not field.is_required() and field.alias is None
}


def places_of(value, *, in_objects=True):
    """The objects, or all containers, of a body, without the caller's own JSON Schemas."""
    if isinstance(value, dict | list):
        if isinstance(value, dict) or not in_objects:
            yield value
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in entries:
            if name not in ("parameters", "schema", "metadata"):
                yield from places_of(each, in_objects=in_objects)


def outcome(body):
    """Returns a call without the ids of its items, or the field that is refused."""
    try:
        call = read_response(json.dumps(body).encode(), "r")
    except InvalidRequestError as error:
        return error.field
    return replace(call, input_items=re.sub(rb'"id": "\w+_[0-9a-f]{32}", ', b"", call.input_items))


@given(data=st.data())
def test_a_null_is_an_absent_field_at_every_depth(data):
    nulled, absent = copy.deepcopy(BODY), copy.deepcopy(BODY)
    index = data.draw(st.integers(0, len(list(places_of(BODY))) - 1))
    name = data.draw(st.sampled_from(sorted({"made_up", "parsed", "namespace"} | OPTIONAL)))
    list(places_of(nulled))[index][name] = None
    list(places_of(absent))[index].pop(name, None)
    assert outcome(nulled) == outcome(absent)


def test_an_unknown_field_that_says_something_is_refused_at_every_depth():
    for index in range(len(list(places_of(BODY)))):
        body = copy.deepcopy(BODY)
        list(places_of(body))[index]["made_up"] = "x"
        with pytest.raises(InvalidRequestError, match=r"made_up is not supported"):
            read_response(json.dumps(body).encode(), "r")


@pytest.mark.parametrize("parameters", ['{"a": 1e999}', '{"a": "' + "x" * 2**20 + '"}'])
@pytest.mark.parametrize("choice", ["none", "auto"])
def test_tools_that_a_response_cannot_repeat_are_refused(parameters, choice):
    body = json.dumps({
        "model": "m", "input": "x", "tool_choice": choice,
        "tools": [{"type": "function", "name": "f", "parameters": "HERE"}],
    })  # fmt: skip
    with pytest.raises(InvalidRequestError) as caught:
        read_response(body.replace('"HERE"', parameters).encode(), "r")
    assert caught.value.field == "tools"


@settings(max_examples=300)
@given(data=st.data())
def test_nonsense_anywhere_is_refused_or_read_and_never_an_error_of_ours(data):
    body = copy.deepcopy(BODY)
    place = data.draw(st.sampled_from(list(places_of(body, in_objects=False))))
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    if keys:
        place[data.draw(st.sampled_from(keys))] = data.draw(JUNK)
    outcome(body)
