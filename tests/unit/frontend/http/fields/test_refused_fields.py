"""Refusals name the field of the body that is to blame, by the frontend and by the engine."""

import pytest

from protos.common.v1.failure_pb2 import Failure
from tests.support.responses import running

FORM = {"type": "json_schema", "name": "f", "schema": {}}
TOOL = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT_FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": {}}}
BODIES = {
    "/v1/completions": {"prompt": "Hi", "structured_outputs": {"regex": "a"}},
    "/v1/chat/completions": CHAT | {"response_format": CHAT_FORM},
    "/v1/responses": {"input": "Hi", "text": {"format": FORM}},
}


async def refused_param(client, path: str, body: dict) -> str | None:
    answer = await client.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400
    return answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/completions", "structured_outputs"),
        ("/v1/chat/completions", "response_format"),
        ("/v1/responses", "text"),
    ],
)
async def test_the_engine_refuses_a_form_by_the_name_that_the_body_has(path, param):
    async with running() as (engine, _, client):
        engine.rejection = Failure(code=3, message="no", field="structured_output")
        assert await refused_param(client, path, BODIES[path]) == param


async def test_a_refused_form_of_calls_is_that_of_the_tools():
    async with running() as (engine, _, client):
        engine.rejection = Failure(code=3, message="no", field="structured_output")
        body = {"input": "Hi", "tools": [{"type": "function", **TOOL}]}
        assert await refused_param(client, "/v1/responses", body) == "tools"


async def test_the_engine_refuses_other_fields_by_their_own_name():
    async with running() as (engine, _, client):
        for field in ("logit_bias", "stop_token_ids"):
            engine.rejection = Failure(code=3, message="no", field=field)
            assert await refused_param(client, "/v1/chat/completions", CHAT) == field
        engine.rejection = Failure(code=3, message="no")
        assert await refused_param(client, "/v1/chat/completions", CHAT) is None


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/tokenize", "prompt"),
        ("/v1/messages/count_tokens", "messages"),
    ],
)
@pytest.mark.parametrize("size", [200, 200_000])
async def test_a_prompt_that_is_too_long_is_refused_by_the_name_of_the_body(path, field, size):
    text = "x" * size  # a large body is read in a process of its own
    message = [{"role": "user", "content": text}]
    prompt = message if field == "messages" else text
    async with running(max_prompt_bytes=100) as (_, _, client):
        answer = await client.post(path, json={"model": "fake", field: prompt})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "the limit is 100" in error["message"]
        assert error.get("param", field) == field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1, 10**6]}, "prompt"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
        ("/v1/completions", {"prompt": "Hi", "stop": ["x" * 10_000]}, "stop"),
        ("/v1/chat/completions", CHAT | {"stop": ["a"] * 1000}, "stop"),
    ],
)
async def test_the_frontend_names_what_it_refuses_after_parsing(path, body, param):
    async with running() as (_, _, client):
        assert await refused_param(client, path, body) == param
