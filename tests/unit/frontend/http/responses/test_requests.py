"""Requests for responses: what is read, what is refused, how they end, and whose they are."""

import asyncio
import json

import pytest
import structlog
from openai.types.responses import response_create_params

from protos.common.v1.failure_pb2 import Failure
from services.frontend.http.responses.calls import read_response
from services.frontend.http.responses.schema import ResponsesRequest
from tests.support.responses import (
    PATH,
    TOOLS,
    check_events,
    check_response,
    prompt_of,
    read_events,
    running,
    wish,
)
from tests.support.waiting import until

KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}
INERT = {
    "background": False,
    "max_tool_calls": 3,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": True},
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "text": {"verbosity": "low", "format": {"type": "text"}},
    "reasoning": {"summary": "auto"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Fields with values that change no answer."""
REFUSED = {
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "p"},
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "m"},
    "background_options": {"completion_window": "soonest"},
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "auto"},
    "prompt_cache_options": {"prewarm": True},
    "include": ["made_up.results"],
    "n": 2,
    "max_tokens": 5,
    "max_output_tokens": 0,
    "temperature": 3,
    "top_p": 0,
    "top_logprobs": 3,
    "metadata": {str(i): "x" for i in range(17)},
    "text": {"format": {"type": "grammar"}},
    "reasoning": {"effort": 3},
    "truncation": "middle",
    "tools": [{"type": "web_search"}],
    "tool_choice": {"type": "file_search"},
    "model": 3,
    "input": 3,
    "stream": "yes",
    "store": "no",
    "previous_response_id": 3,
}


async def refusal_of(client, **changes):
    response = await client.post(PATH, json=wish(**changes))
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_sampling_reaches_the_engine():
    wishes = {
        "temperature": 0.5, "top_p": 0.25, "seed": 7, "frequency_penalty": 1.5,
        "presence_penalty": -0.5, "top_k": 4, "min_p": 0.125, "repetition_penalty": 1.25,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9],
    }  # fmt: skip
    async with running() as (engine, _, client):
        body = (await client.post(PATH, json=wish(**wishes, max_output_tokens=5))).json()
        told = {field.name: value for field, value in engine.submits[0].sampling.ListFields()}
        assert told == wishes | {"max_tokens": 5}
        told_back = {name: body[name] for name in ("temperature", "top_p", "frequency_penalty")}
        assert told_back == {"temperature": 0.5, "top_p": 0.25, "frequency_penalty": 1.5}
        bare = (await client.post(PATH, json=wish())).json()
    assert (bare["temperature"], bare["top_p"]) == (0.5, 1.0)  # the model's own, then neutral


async def test_fields_that_change_no_answer_are_taken():
    async with running() as (engine, _, client):
        plain = (await client.post(PATH, json=wish())).json()
        for name, value in INERT.items():
            response = await client.post(PATH, json=wish(**{name: value}))
            assert response.status_code == 200, response.text
            assert prompt_of(engine) == prompt_of(engine, 0)
            assert response.json()["output"][0]["content"] == plain["output"][0]["content"]


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(name):
    async with running() as (engine, _, client):
        error = await refusal_of(client, **{name: REFUSED[name]})
        assert error["param"] == name
        assert name in error["message"]
        assert not engine.submits


def test_every_parameter_of_the_client_is_known_or_refused():
    params = response_create_params.ResponseCreateParamsNonStreaming
    names = {n for base in params.__mro__ for n in getattr(base, "__annotations__", {})}
    assert names - set(ResponsesRequest.model_fields) <= set(REFUSED)
    nulls = dict.fromkeys(names) | wish()
    assert read_response(json.dumps(nulls).encode(), "r").previous_response_id is None


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ({"type": "compaction", "id": "w"}, "input.0: 'compaction'"),
        ({"id": "msg_1"}, "input.0: 'item_reference'"),
        ({}, "input.0: 'untyped'"),
        (3, "input.0: 'untyped'"),
        ({"role": "user", "content": "x", "tone": "rude"}, "input.0.tone is not supported"),
        ({"role": "boss", "content": "x"}, "input.0.role"),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": 5},
            "input.0.arguments",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "no earlier tool call"),
    ],
)
async def test_a_wrong_item_is_refused_with_its_place(entry, path):
    async with running() as (_, _, client):
        error = await refusal_of(client, input=[entry], tools=TOOLS)
    assert path in error["message"]
    assert error["param"] == "input"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function", "name": "sub"}, "tools": TOOLS}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "sub"}],
                },
            },
            "tool_choice",
        ),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        (
            {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning",
        ),
        (
            {
                "text": {"format": {"type": "json_object"}},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
        ),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input"),
    ],
)
async def test_fields_that_contradict_each_other_are_refused(changes, param):
    async with running() as (engine, _, client):
        assert (await refusal_of(client, **changes))["param"] == param
        assert not engine.submits


async def test_mistakes_have_the_codes_of_openai():
    async with running() as (_, _, client):
        unknown = await refusal_of(client, made_up=1)
        nested = await refusal_of(client, input=[{"role": "user", "content": "x", "tone": "rude"}])
        value = await refusal_of(client, truncation="middle")
    assert [each["code"] for each in (unknown, nested)] == ["unknown_parameter"] * 2
    assert (value["code"], value["param"]) == ("invalid_value", "truncation")


async def test_effort_is_a_variable_of_the_template():
    async with running() as (engine, _, client):
        body = (await client.post(PATH, json=wish(reasoning={"effort": "low"}))).json()
        assert prompt_of(engine).endswith("assistant\nlow")
    assert body["reasoning"] == {"effort": "low", "summary": None}


async def test_instructions_join_a_system_message_at_the_beginning():
    items = [{"role": "system", "content": "Second."}, {"role": "user", "content": "x"}]
    async with running() as (engine, _, client):
        await client.post(PATH, json=wish(input=items, instructions="First."))
        assert "<|im_start|>system\nFirst.\n\nSecond.<|im_end|>" in prompt_of(engine)


async def test_a_failure_in_a_stream_is_its_last_event():
    async with running() as (engine, stack, client):
        engine.failure = Failure(code=14, message="the worker died")
        response = await client.post(PATH, json=wish(stream=True))
        counts = stack.server.requests.counts
        assert counts.failed["EngineUnavailableError"] == 1
    *_, last = events = read_events(response.text)
    assert "[DONE]" not in response.text
    assert last["type"] == "response.failed"
    failed = check_response(last["response"])
    assert (failed["status"], failed["error"]["message"]) == ("failed", "the worker died")
    assert failed["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(("code", "status"), [(3, 400), (8, 429), (14, 503), (13, 500)])
async def test_a_refusal_before_the_stream_has_a_status(code, status):
    async with running() as (engine, _, client):
        engine.rejection = Failure(code=code, message="no")
        response = await client.post(PATH, json=wish(stream=True))
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_its_request_and_nothing_is_stored(stream):
    async with running("one two " * 100, eos=False) as (engine, _, client):
        engine.pause()
        call = asyncio.create_task(client.post(PATH, json=wish(stream=stream)))
        await until(lambda: engine.live)
        call.cancel()
        await until(lambda: not engine.live)
        assert len(engine.aborted) == 1


async def test_limits_of_live_requests_hold_and_refusals_are_counted():
    async with running("one two", max_live_requests=1) as (engine, _, client):
        engine.pause()
        first = asyncio.create_task(client.post(PATH, json=wish()))
        await until(lambda: engine.live)
        refused = await client.post(PATH, json=wish())
        engine.resume()
        assert (await first).status_code == 200
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


async def test_requests_are_logged_with_the_id_of_the_response_and_without_text():
    with structlog.testing.capture_logs() as lines:
        async with running("a secret") as (_, _, client):
            response = await client.post(PATH, json=wish(input="a question"))
    [line] = [line for line in lines if line["event"] == "request_finished"]
    assert line["method"] == "HttpResponse"
    told = json.dumps(lines, default=str)
    assert "secret" not in told
    assert "question" not in told
    assert response.headers["x-request-id"]


async def test_a_long_conversation_drops_its_oldest_turns_only_if_asked():
    turns = []
    for number in range(40):
        turns += [
            {"role": "user", "content": f"question {number} " + "x" * 100},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    items = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "?"}]
    async with running() as (engine, _, client):
        assert "tokens" in (await refusal_of(client, input=items))["message"]
        assert not engine.submits
        wishes = {"truncation": "auto", "max_output_tokens": 200, "instructions": "First."}
        body = (await client.post(PATH, json=wish(input=items, **wishes))).json()
        assert body["truncation"] == "auto"
        prompt = prompt_of(engine)
        num_tokens = body["usage"]["input_tokens"]
        assert 4096 - 400 < num_tokens <= 4096 - 200
        assert prompt.startswith("<|im_start|>system\nFirst.\n\nBe kind.<|im_end|>")
        assert "question 0 " not in prompt
        assert "question 39 " in prompt
        assert prompt.endswith("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
        # It goes on from what was kept.
        more = {"previous_response_id": body["id"], "input": "more?", **wishes}
        again = (await client.post(PATH, json=wish(**more))).json()
        assert again["usage"]["input_tokens"] <= 4096 - 200
        assert "question 0 " not in prompt_of(engine)
        short = await client.post(PATH, json=wish(truncation="auto"))
        assert short.status_code == 200
        long = {"truncation": "auto", "input": "x" * 5000}
        assert "tokens" in (await refusal_of(client, **long))["message"]


async def test_a_key_sees_its_own_responses_alone(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[keys.{name}]\nkey = "{key}"\n' for name, key in KEYS.items()))
    headers = {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()}
    async with running(api_keys_file=path) as (engine, _, client):
        made = await client.post(PATH, json=wish(), headers=headers["alice"])
        own = f"{PATH}/{made.json()['id']}"
        more = wish(previous_response_id=made.json()["id"])
        for call in (
            client.get(own, headers=headers["bob"]),
            client.delete(own, headers=headers["bob"]),
            client.post(PATH, json=more, headers=headers["bob"]),
        ):
            assert (await call).status_code == 404
        assert (await client.get(own)).status_code == 401
        assert len(engine.submits) == 1
        assert (await client.get(own, headers=headers["alice"])).json() == made.json()
        again = await client.post(PATH, json=more, headers=headers["alice"])
        assert again.status_code == 200


async def test_the_store_has_the_limits_of_its_flags():
    async with running(max_stored_responses=2) as (_, _, client):
        ids = [(await client.post(PATH, json=wish())).json()["id"] for _ in range(3)]
        found = [(await client.get(f"{PATH}/{each}")).status_code for each in ids]
    assert found == [404, 200, 200]
    async with running(max_stored_responses=0) as (_, _, client):
        body = (await client.post(PATH, json=wish(store=True))).json()
        assert body["store"] is False
        assert (await client.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_a_stored_response_is_not_streamed_again():
    async with running() as (_, _, client):
        body = (await client.post(PATH, json=wish())).json()
        response = await client.get(f"{PATH}/{body['id']}?stream=true")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


async def test_a_large_body_is_read_in_the_process_for_them():
    items = [{"role": "user", "content": "hello"}] * 2000
    async with running() as (_, _, client):
        response = await client.post(PATH, json=wish(input=items), timeout=60)
        assert "tokens" in response.json()["error"]["message"]
        kept = await client.post(PATH, json=wish(input=items, truncation="auto"), timeout=60)
    assert kept.status_code == 200


async def test_events_are_whole_for_every_kind_of_item():
    async with running("<think>\nSums.\n</think>\n\nI add.") as (_, _, client):
        response = await client.post(PATH, json=wish(stream=True))
    final = check_events(read_events(response.text))
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]


async def test_a_wrong_body_is_refused_like_others():
    async with running() as (_, _, client):
        for content, status in ((b"{", 400), (b"[]", 400), (b"null", 400)):
            headers = {"content-type": "application/json"}
            response = await client.post(PATH, content=content, headers=headers)
            assert response.status_code == status
        typed = await client.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
        other = await client.post(PATH, json=wish(model="other"))
    assert (typed.status_code, other.status_code) == (415, 404)
    assert other.json()["error"]["param"] == "model"
