"""A body that does not validate is refused with the path, the value, and what would be right."""

import json

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.http.chat.schema import TAGS, ChatCompletionRequest
from services.frontend.http.completions.schema import CompletionRequest
from services.frontend.http.fields.parse import parse_body

USER = {"role": "user", "content": "x"}


def refusal_of(body_class, **fields):
    with pytest.raises(InvalidRequestError) as refusal:
        parse_body(body_class, json.dumps({"model": "m", **fields}).encode(), tags=TAGS)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            [{"type": "video_url", "video_url": {"url": "x"}}],
            "messages.0.content.0: 'video_url' is not supported here; 'text', 'image_url' are",
        ),
        ([{"type": "image_url", "image_url": {}}], "messages.0.content.0.image_url.url: Field"),
        ([{"type": "text", "text": 5}], "messages.0.content.0.text: Input should be a valid str"),
        ([{"type": "text", "text": "", "z": 1}], "messages.0.content.0.z is not supported"),
        (5, "messages.0.content: Input should be a valid string"),
        (None, "messages.0: a message must have content, or tool_calls"),
    ],
)
def test_a_wrong_content_is_named_in_the_form_that_was_meant(content, told):
    message = {"role": "user", "content": content}
    assert refusal_of(ChatCompletionRequest, messages=[message]).startswith(told)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": [5]}, "stop.0: Input should be a valid string"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": ""}, "stop: String should have at least 1 character"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
        ({"tool_choice": "any"}, "tool_choice: 'any' is not supported here; use 'none', 'auto'"),
        ({"tools": [{"type": "web"}]}, "tools.0.type: 'web' is not supported here; use 'function'"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    ],
)
def test_a_path_has_no_names_of_forms(fields, told):
    assert refusal_of(ChatCompletionRequest, messages=[USER], **fields).startswith(told)


def test_a_prompt_is_taken_for_the_form_that_it_has_deepest():
    found = refusal_of(CompletionRequest, prompt=[[1], [-1]])
    assert found == "prompt.1.0: Input should be greater than or equal to 0"


@pytest.mark.parametrize(("prompt", "place"), [([], "prompt"), ([[]], "prompt.0")])
def test_an_empty_list_is_not_told_to_be_something_else(prompt, place):
    assert refusal_of(CompletionRequest, prompt=prompt).startswith(f"{place}: List should have at")


def test_a_long_value_is_shortened():
    found = refusal_of(ChatCompletionRequest, messages=[USER], tools=[{"type": "w" * 5000}])
    assert len(found) < 200


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("guided_json", "structured_outputs with json, or response_format with json_schema"),
        ("guided_json_object", "structured_outputs with json_object, or response_format with the"),
        ("guided_regex", "structured_outputs with regex"),
        ("guided_choice", "structured_outputs with choice"),
        ("guided_grammar", "structured_outputs with grammar"),
        ("functions", "tools instead"),
        ("enable_thinking", "chat_template_kwargs with enable_thinking"),
        ("max_new_tokens", "max_tokens instead"),
    ],
)
def test_a_field_with_a_successor_is_refused_with_its_name(name, told):
    found = refusal_of(ChatCompletionRequest, messages=[USER], **{name: "x"})
    assert found.startswith(f"{name} is not supported; send {told}")


def test_only_fields_of_the_body_are_successors():
    assert refusal_of(CompletionRequest, prompt="x", functions=[1]) == "functions is not supported"
    nested = [{**USER, "guided_json": {}}]
    found = refusal_of(ChatCompletionRequest, messages=nested)
    assert found == "messages.0.guided_json is not supported"
