"""Fields that cannot change an answer, and fields that only some chat templates know."""

import pytest

from tests.support.byte_tokenizer import tokenizer_files
from tests.support.fake_engine import FakeEngine
from tests.unit.frontend.http.test_app import CHAT, COMPLETION, http_stack

INERT = {
    "user": "me",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KNOWING = (
    "{% if verbosity %}<{{ verbosity }}>{% endif %}{% for m in messages %}"
    "{% if m.role == 'developer' %}D{% endif %}{{ m.name }}:{{ m.content }}{% endfor %}"
)


async def test_fields_that_change_no_answer_change_nothing():
    async with http_stack() as (stack, client):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            extra = INERT | ({"verbosity": "low", "modalities": ["text"]} if "chat" in path else {})
            for each in (body, body | extra):
                answer = await client.post(path, json=each | {"seed": 1, "top_k": -1})
                assert answer.status_code == 200, answer.text
        first, second, third, fourth = stack.engine.submits
    assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)
    assert (third.prompt_token_ids, third.sampling) == (fourth.prompt_token_ids, fourth.sampling)
    assert first.sampling.top_k == 0


NEUTRAL = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "bad_words": [],
    "use_beam_search": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "priority": 0,
}
NEUTRAL_CHAT = NEUTRAL | {
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "echo": False,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "top_logprobs": 0,
}


@pytest.mark.parametrize(
    ("path", "body", "neutral"),
    [
        ("/v1/chat/completions", CHAT, NEUTRAL_CHAT),
        ("/v1/chat/completions", CHAT, {"tools": [], "tool_choice": "none"}),
        (
            "/v1/chat/completions",
            CHAT | {"stream": True},
            {"stream_options": {"include_obfuscation": True}},
        ),
        ("/v1/completions", COMPLETION, NEUTRAL | {"add_special_tokens": True}),
    ],
)
async def test_values_that_say_what_happens_anyway_change_nothing(path, body, neutral):
    async with http_stack() as (stack, client):
        for each in (body, body | neutral):
            answer = await client.post(path, json=each | {"seed": 1})
            assert answer.status_code == 200, answer.text
        first, second = stack.engine.submits
    assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
async def test_the_description_of_a_schema_changes_nothing(path, body):
    form = {"name": "city", "schema": {"type": "object"}}
    async with http_stack() as (stack, client):
        for each in (form, form | {"description": "A city."}):
            wanted = {"response_format": {"type": "json_schema", "json_schema": each}}
            answer = await client.post(path, json=body | wanted | {"seed": 1})
            assert answer.status_code == 200, answer.text
        first, second = stack.engine.submits
    assert first.sampling.structured_output.json_schema == '{"type": "object"}'
    assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_beam_search", True), ("continue_final_message", True), ("priority", 5)],
)
async def test_values_that_say_something_else_are_refused_by_name(name, value):
    async with http_stack() as (_, client):
        answer = await client.post("/v1/chat/completions", json=CHAT | {name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("template", "shown"),
    [(PLAIN, "[system]a[user]b"), (KNOWING, "<low>D:aKim:b")],
    ids=["plain", "knowing"],
)
async def test_a_template_shows_what_it_knows(template, shown):
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b", "name": "Kim"},
    ]
    engine = FakeEngine(files=tokenizer_files(chat_template=template))
    async with http_stack(engine) as (_, client):
        told = await client.post(
            "/tokenize",
            json={"messages": messages, "chat_template_kwargs": {"verbosity": "low"}},
        )
        text = await client.post("/detokenize", json={"tokens": told.json()["tokens"]})
    assert text.json()["prompt"] == shown
