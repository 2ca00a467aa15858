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
