"""The API's description of itself."""

import jsonschema
import pytest

from services.frontend.http.service.openapi import openapi_document
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": [1, 2]}
RESPONSE = {"model": "m", "input": "hello", "tool_choice": {"type": "function", "name": "f"}}
ITEMS = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]


def is_described(path: str, body: dict) -> bool:
    document = openapi_document()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stop": ["a"]}),
        ("/v1/completions", COMPLETION | {"stop": ["a"]}),
        ("/v1/messages", CHAT | {"max_tokens": 9, "stop_sequences": ["a"]}),
        ("/v1/responses", RESPONSE),
        ("/v1/responses", RESPONSE | {"input": ITEMS}),
    ],
)
def test_what_is_read_is_described(path, body):
    assert is_described(path, body)
    assert is_described(path, body | {"temperature": 0.5, "made_up": None})
    assert not is_described(path, body | {"temperature": 3})
    assert not is_described(path, body | {"made_up": 1})
    assert not is_described(path, {"model": "m"})


def references(value):
    if isinstance(value, dict):
        mapping = value.get("discriminator", {}).get("mapping", {})
        yield from ([value["$ref"]] if "$ref" in value else [])
        yield from (mapping.values() if isinstance(mapping, dict) else [])
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from references(each)


def test_every_reference_leads_to_a_schema_with_a_name_of_its_own():
    document = openapi_document()
    schemas = document["components"]["schemas"]
    assert {each.rpartition("/")[2] for each in references(document)} == {*schemas}
    assert [name for name in schemas if "__" in name] == []


async def test_the_document_is_served_and_every_path_of_it_exists():
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, http_port=0) as stack,
        stack.http_client() as client,
    ):
        document = (await client.get("/openapi.json")).json()
        assert document == openapi_document()
        for path, methods in document["paths"].items():
            for method in {"get", "post"} & set(methods):
                there = path.replace("{name}", "fake").replace("{response_id}", "none")
                answer = await client.request(method, there, json={})
                if path == there or "{name}" in path:
                    assert answer.status_code in (200, 400), path
                else:
                    assert answer.json()["error"]["code"] == "response_not_found"
