"""Texts to token ids and back, and the small endpoints beside them."""

import importlib.metadata

from tests.support.byte_tokenizer import reference_tokenizer
from tests.unit.frontend.http.test_app import CHAT, http_stack

TEXT = "hello w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld<|im_end|>"


async def test_a_text_comes_back_as_it_went():
    async with http_stack() as (_, client):
        told = (
            await client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})
        ).json()
        back = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert told["tokens"] == reference_tokenizer().encode(TEXT).ids
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
    assert len(told["token_strs"]) == told["count"]
    assert back == {"prompt": TEXT}


async def test_a_conversation_has_the_tokens_that_the_engine_gets():
    async with http_stack() as (_, client):
        told = (await client.post("/tokenize", json=CHAT)).json()
        usage = (await client.post("/v1/chat/completions", json=CHAT)).json()["usage"]
    assert told["count"] == usage["prompt_tokens"]
    assert told["token_strs"] is None


async def test_wrong_requests_for_tokens_are_refused_by_name():
    async with http_stack() as (_, client):
        for path, body, field in (
            ("/tokenize", {"prompt": "a", **CHAT}, None),
            ("/tokenize", {}, None),
            ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
            (
                "/tokenize",
                {"prompt": "a", "continue_final_message": True},
                "continue_final_message",
            ),
            ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
        ):
            response = await client.post(path, json=body)
            assert response.status_code in (400, 404), (path, body)
            assert response.json()["error"]["param"] == field, (path, body)


async def test_large_texts_and_lists_are_converted():
    async with http_stack() as (_, client):
        told = (await client.post("/tokenize", json={"prompt": "hello " * 20_000})).json()
        back = await client.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json()["prompt"] == "hello " * 20_000


async def test_version_ping_and_the_list_of_models_with_a_slash():
    async with http_stack() as (_, client):
        version = await client.get("/version")
        pings = [await client.get("/ping"), await client.post("/ping")]
        models = await client.get("/v1/models/")
    assert version.json() == {"version": importlib.metadata.version("octavo")}
    assert [each.status_code for each in pings] == [200, 200]
    assert models.json()["object"] == "list"
