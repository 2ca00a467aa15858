"""A frontend for tests of the Responses API, and checks of bodies and streams of events."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import numpy as np

from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import FrontendStack, frontend_stack

PATH = "/v1/responses"
TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.reasoning_content %}
{{- "<think>" + message.reasoning_content + "</think>" }}
{%- endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{{- "<|im_start|>assistant\\n" }}
{%- if reasoning_effort %}{{- reasoning_effort }}{%- endif %}
"""
"""Knows tools, calls, reasoning and its effort."""
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REPLY = f"<think>\nSums.\n</think>\n\nI add.\n{CALL}\n" + CALL.replace("1", "2")
"""Reasoning, a text and two calls."""
REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
    "previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs",
    "temperature", "reasoning", "user", "usage", "max_output_tokens", "max_tool_calls", "store",
    "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""Fields that a response must have in the Open Responses specification."""
ITEM_FIELDS = {
    "message": {"type", "id", "status", "role", "content"},
    "reasoning": {"type", "id", "status", "summary", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "custom_tool_call": {"type", "id", "status", "call_id", "name", "input"},
}


@asynccontextmanager
async def running(
    reply: str = "hello world", *, eos: bool = True, **config: object
) -> AsyncIterator[tuple[FakeEngine, FrontendStack, httpx.AsyncClient]]:
    """Starts a frontend of an engine that always writes `reply`."""
    files = tokenizer_files(chat_template=TEMPLATE)
    engine = FakeEngine(script=says(reply, eos=eos), files=files, max_model_len=4096)
    async with (
        engine,
        frontend_stack(engine, http_port=0, **config) as stack,
        stack.http_client() as client,
    ):
        yield engine, stack, client


def wish(**changes: object) -> dict:
    """A request, without tools unless they are among the changes."""
    return {"model": "fake", "input": "1?", **changes}


def prompt_of(engine: FakeEngine, index: int = -1) -> str:
    """The prompt of a request that the engine got, the last one by default."""
    ids = np.frombuffer(engine.submits[index].prompt_token_ids, "<u4").tolist()
    return reference_tokenizer().decode(ids, skip_special_tokens=False)


def check_response(body: dict) -> dict:
    """Checks that a response is whole, and returns it."""
    assert set(body) >= REQUIRED
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    ids = [item["id"] for item in body["output"]]
    assert len(ids) == len(set(ids))
    for item in body["output"]:
        assert set(item) - {"namespace"} == ITEM_FIELDS[item["type"]]
    assert (body["completed_at"] is not None) is (body["status"] == "completed")
    if body["usage"] is not None:
        usage = body["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return body


def read_events(text: str) -> list[dict]:
    """The events of a stream that ended by itself; each is named by its type."""
    events = []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        if lines == ["data: [DONE]"]:
            break
        name, data = lines
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def check_events(events: list[dict]) -> dict:
    """Checks the order of a whole stream's events, and that they build its last response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, begun, *middle, last = events
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert check_response(created["response"]) == begun["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    final = check_response(last["response"])
    assert last["type"] == f"response.{final['status']}"
    assert final["id"] == created["response"]["id"]
    items: list[dict] = []
    waiting = middle
    while waiting:
        waiting = _take_item(waiting, items)
    assert items == final["output"]
    return final


def _take_item(events: list[dict], items: list[dict]) -> list[dict]:
    """Takes the events of one item; returns those after it."""
    added, *events = events
    item = added["item"]
    place = {"output_index": len(items), "item_id": item["id"]}
    assert added["type"] == "response.output_item.added"
    assert (added["output_index"], item["status"]) == (len(items), "in_progress")
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        name, field = "response.function_call_arguments", "arguments"
    elif item["type"] == "custom_tool_call":
        assert item["input"] == ""
        name, field = "response.custom_tool_call_input", "input"
    else:
        place["content_index"] = 0
        part_added, *events = events
        assert item["content"] == []
        assert part_added["type"] == "response.content_part.added"
        assert _place_of(part_added) == place
        assert part_added["part"]["text"] == ""
        name, field = f"response.{part_added['part']['type']}", "text"
    text = ""
    while events[0]["type"] == f"{name}.delta":
        assert _place_of(events[0]) == place
        text += events.pop(0)["delta"]
    done, *events = events
    assert (done["type"], done[field], _place_of(done)) == (f"{name}.done", text, place)
    if field == "text":
        part_done, *events = events
        assert (part_done["type"], _place_of(part_done)) == ("response.content_part.done", place)
        assert part_done["part"]["text"] == text
    item_done, *events = events
    assert item_done["type"] == "response.output_item.done"
    assert item_done["output_index"] == len(items)
    assert item_done["item"]["id"] == item["id"]
    items.append(item_done["item"])
    return events


def _place_of(event: dict) -> dict:
    return {
        name: event[name] for name in ("output_index", "item_id", "content_index") if name in event
    }
