"""Real answers have the forms that the OpenAPI document describes, and no fields besides."""

import json

import jsonschema
import pytest

from protos.common.v1.failure_pb2 import Failure
from services.frontend.http.service.openapi import openapi_document
from tests.support.responses import REPLY, running

USER = {"role": "user", "content": "1?"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
CHAT = {"model": "fake", "messages": [USER]}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE = {"model": "fake", "input": "1?"}
RESPONSE_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
MESSAGE = {**CHAT, "max_tokens": 500}
MESSAGE_TOOLS = {"tools": [{"name": "add", "input_schema": PARAMETERS}]}
FORM = {"type": "json_schema", "name": "f", "schema": {"type": "object"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
WISHES = {
    "/v1/chat/completions": [
        CHAT | CHAT_TOOLS,
        CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2, "stop": "add"},
    ],
    "/v1/completions": [{"model": "fake", "prompt": "1?", "logprobs": 1, "echo": True}],
    "/v1/messages": [
        MESSAGE | MESSAGE_TOOLS,
        MESSAGE | {"max_tokens": 2},
        MESSAGE | {"stop_sequences": ["add"]},
    ],
    "/v1/responses": [
        RESPONSE | RESPONSE_TOOLS,
        RESPONSE | RESPONSE_TOOLS | {"tool_choice": ALLOWED, "metadata": {"a": "b"}},
        RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        RESPONSE | {"max_output_tokens": 2, "reasoning": {"effort": "low"}, "user": "me"},
        RESPONSE | {"text": {"format": FORM}, "store": False, "instructions": "Be short."},
    ],
}
CASES = [(path, wish) for path, wishes in WISHES.items() for wish in wishes]


def closed(value):
    """Returns schemas that allow only the fields that they describe."""
    if isinstance(value, list):
        return [closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    own = {name: closed(each) for name, each in value.items()}
    if isinstance(own.get("properties"), dict) and own.get("type") == "object":
        own.setdefault("additionalProperties", False)
    return own


@pytest.fixture(scope="module")
def document():
    return closed(openapi_document())


def check(document, path, kind, value, method="post", status="200"):
    content = document["paths"][path][method]["responses"][status]["content"][kind]["schema"]
    schema = content if kind == "application/json" else content["contentSchema"]
    jsonschema.validate(value, {**schema, "components": document["components"]})


def check_events(document, path, text):
    kinds = []
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            check(document, path, "text/event-stream", event)
            kinds.append(event.get("type"))
    return kinds


@pytest.mark.parametrize(("path", "wish"), CASES)
async def test_an_answer_whole_and_as_events_has_the_described_form(document, path, wish):
    async with running(REPLY) as (_, _, client):
        whole = await client.post(path, json=wish)
        assert whole.status_code == 200, whole.text
        check(document, path, "application/json", whole.json())
        streamed = await client.post(path, json=wish | {"stream": True})
        assert len(check_events(document, path, streamed.text)) > 3
        if path == "/v1/responses" and wish.get("store") is not False:
            stored = await client.get(f"{path}/{whole.json()['id']}")
            check(document, f"{path}/{{response_id}}", "application/json", stored.json(), "get")


@pytest.mark.parametrize(("path", "last"), [("/v1/messages", "error"),
                                            ("/v1/responses", "response.failed")])  # fmt: skip
async def test_a_failure_in_a_stream_has_the_described_form(document, path, last):
    async with running(REPLY) as (engine, _, client):
        engine.failure = Failure(code=14, message="the worker died")
        [wish, *_] = WISHES[path]
        response = await client.post(path, json=wish | {"stream": True})
    assert check_events(document, path, response.text)[-1] == last


@pytest.mark.parametrize("path", WISHES)
async def test_a_refusal_has_the_described_form(document, path):
    async with running(REPLY) as (_, _, client):
        refused = await client.post(path, json=WISHES[path][0] | {"made_up": 1})
        check(document, path, "application/json", refused.json(), status=str(refused.status_code))


async def test_counts_token_ids_and_models_have_the_described_forms(document):
    async with running() as (_, _, client):
        for path, body in (
            ("/v1/messages/count_tokens", CHAT),
            ("/tokenize", {"prompt": "1?", "return_token_strs": True}),
            ("/detokenize", {"tokens": [5, 6]}),
        ):
            answer = await client.post(path, json=body)
            check(document, path, "application/json", answer.json())
        for path in ("/v1/models", "/version", "/health"):
            answer = await client.get(path)
            check(document, path, "application/json", answer.json(), "get")
