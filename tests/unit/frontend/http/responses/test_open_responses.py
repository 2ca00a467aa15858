"""The cases of the Open Responses compliance list, in words of our own.

Left out: compaction and WebSockets, which are not served.
"""

import base64

import pytest

from tests.support.responses import (
    CALL,
    PATH,
    check_events,
    check_response,
    prompt_of,
    read_events,
    running,
    wish,
)
from tests.support.vision import png, prompt, shown, vision_http

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
WEATHER_CALL = CALL.replace("add", "get_weather").replace('"a": 1', '"location": "Bonn"')


def message(role, content, **fields):
    return {"type": "message", "role": role, "content": content, **fields}


async def whole(client, **changes):
    response = await client.post(PATH, json=wish(**changes))
    assert response.status_code == 200, response.text
    return check_response(response.json())


async def streamed(client, **changes):
    response = await client.post(PATH, json=wish(stream=True, **changes))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    events = read_events(response.text)
    return events, check_events(events)


async def test_a_user_message_is_answered():
    async with running() as (_, _, client):
        body = await whole(client, input=[message("user", "Say hello.")])
    [item] = body["output"]
    assert (body["status"], item["type"], item["role"]) == ("completed", "message", "assistant")
    assert item["content"][0]["text"] == "hello world"


async def test_a_stream_has_events_and_ends_with_the_whole_response():
    async with running() as (_, _, client):
        events, final = await streamed(client, input=[message("user", "Count.")])
    assert "response.output_text.delta" in {event["type"] for event in events}
    assert final["status"] == "completed"
    assert final["usage"]["output_tokens"] > 0


async def test_a_system_message_comes_first():
    async with running() as (engine, _, client):
        await whole(client, input=[message("system", "Be short."), message("user", "Hi.")])
        assert prompt_of(engine).startswith("<|im_start|>system\nBe short.<|im_end|>")


async def test_a_tool_is_called():
    async with running(WEATHER_CALL) as (_, _, client):
        body = await whole(client, input=[message("user", "Weather?")], tools=[WEATHER])
    [item] = body["output"]
    assert (item["type"], item["name"]) == ("function_call", "get_weather")
    assert item["arguments"] == '{"location": "Bonn"}'
    assert body["tools"] == [{**WEATHER, "strict": False}]


async def test_a_tool_call_streams_its_arguments():
    async with running(WEATHER_CALL) as (_, _, client):
        events, final = await streamed(client, tools=[WEATHER])
    types = [event["type"] for event in events]
    assert types.count("response.function_call_arguments.delta") > 1
    assert types.count("response.function_call_arguments.done") == 1
    assert final["output"][0]["name"] == "get_weather"


async def test_earlier_turns_are_part_of_the_prompt():
    turns = [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice!"),
        message("user", "What is my name?"),
    ]
    async with running() as (engine, _, client):
        await whole(client, input=turns)
        assert "<|im_start|>assistant\nHello Alice!<|im_end|>" in prompt_of(engine)


@pytest.mark.parametrize("phase", ["commentary", "final_answer"])
async def test_the_phase_of_an_earlier_answer_is_taken(phase):
    turns = [
        message("user", "Hi."),
        message("assistant", [{"type": "output_text", "text": "Hello."}], phase=phase),
        message("user", "Go on."),
    ]
    async with running() as (_, _, client):
        assert (await whole(client, input=turns))["status"] == "completed"


async def test_an_image_is_refused_by_a_model_that_sees_none():
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    content = [{"type": "input_text", "text": "What is it?"}, picture]
    async with running() as (_, _, client):
        response = await client.post(PATH, json=wish(input=[message("user", content)]))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert "the model 'fake' takes text: it sees no images" in error["message"]


async def test_an_image_is_part_of_the_input():
    url = "data:image/png;base64," + base64.b64encode(png(32, 48)).decode()
    content = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": url},
    ]
    async with vision_http() as (engine, _, client):
        body = wish(input=[message("user", content)])
        response = await client.post(PATH, json=body)
    assert check_response(response.json())["status"] == "completed"
    assert shown(engine) == prompt(("user", "What is it?(<3x2>)"))


async def test_a_previous_response_that_is_missing_is_named():
    async with running() as (engine, _, client):
        response = await client.post(PATH, json=wish(previous_response_id="resp_missing"))
        assert not engine.submits
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "previous_response_not_found")
    assert error["param"] == "previous_response_id"


async def test_a_response_that_was_not_stored_cannot_be_continued():
    async with running() as (_, _, client):
        first = await whole(client, store=False)
        response = await client.post(PATH, json=wish(previous_response_id=first["id"]))
    assert first["store"] is False
    assert response.json()["error"]["code"] == "previous_response_not_found"
