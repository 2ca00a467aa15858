"""Replies that are no clean calls: every API answers them, and takes its answers back."""

import itertools
import json
from contextlib import asynccontextmanager

import pytest

from protos.common.v1.sampling_pb2 import FINISH_REASON_STOP
from protos.frontend.v1 import frontend_pb2
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.responses import TEMPLATE

ASKED = [{"role": "user", "content": "1?"}]
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
BODIES = {
    "/v1/chat/completions": {
        "messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {"input": "1?", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": ASKED, "max_tokens": 8192,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    },
}  # fmt: skip
ODD_REPLIES = {
    "hermes": [
        r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "add", "arguments": "\ud83d"}</tool_call>',
        r'<tool_call>{"name": "add", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
        r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999, "b": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1',
    ],
    "pythonic": [
        "[add(a={1,2})]", '[add(a=b"x")]', "[add(a=1j)]", "[add(a=...)]", "[add(a={(1,2): 3})]",
        r'[add(a="\ud800")]', "[add(a=1e999)]", "[add(a=Oslo)]", '[add("Oslo")]',
        "[add(a=0x" + "f" * 3600 + ")]",  # more decimal digits than Python converts
    ],
}  # fmt: skip


@asynccontextmanager
async def running(form):
    engine = FakeEngine(files=tokenizer_files(chat_template=TEMPLATE), max_model_len=16384)
    async with (
        engine,
        frontend_stack(engine, http_port=0, reply_format=form) as stack,
        stack.http_client() as client,
    ):
        yield engine, stack, client


@pytest.mark.parametrize("form", ODD_REPLIES)
async def test_no_text_of_a_model_breaks_a_body_a_stream_or_the_next_turn(form):
    async with running(form) as (engine, _, client):

        async def answer(path, **changes):
            body = {"model": "fake", **BODIES[path], **changes}
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.content

        for reply, path in itertools.product(ODD_REPLIES[form], BODIES):
            engine.script = says(reply)
            engine.tokens_per_step = len(reply)
            whole = json.loads(await answer(path), parse_constant=pytest.fail)
            # A long one in larger steps: each step is a message and an event.
            engine.tokens_per_step = 1 + len(reply) // 100
            lines = (await answer(path, stream=True)).decode().splitlines()
            told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            events = [json.loads(each) for each in told if each != "[DONE]"]
            assert told[-1] == "[DONE]" or events[-1]["type"] in (
                "message_stop",
                "response.completed",
            )
            engine.script = says("So be it.")
            engine.tokens_per_step = len(reply)
            await answer(path, **next_turn(path, whole))


def next_turn(path, answer):
    """Returns the fields of a request that continues an answer with a result of its call."""
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        [call] = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "no"}
        return {"messages": [*ASKED, message, result]}
    if path == "/v1/responses":
        [call] = answer["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}
        return {"previous_response_id": answer["id"], "input": [result]}
    [block] = answer["content"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "no"}
    turn = {"role": "assistant", "content": [block]}
    return {"messages": [*ASKED, turn, {"role": "user", "content": [result]}]}


@pytest.mark.parametrize("form", ODD_REPLIES)
async def test_no_text_of_a_model_breaks_a_stream_over_grpc(form):
    request = frontend_pb2.ChatRequest(messages=ASKED, tools=[{"name": "add"}])
    async with running(form) as (engine, stack, _):
        for reply in ODD_REPLIES[form]:
            engine.script = says(reply)
            engine.tokens_per_step = 1 + len(reply) // 100
            outputs = [response.output async for response in stack.stub.Chat(request)]
            assert outputs[-1].finish_reason == FINISH_REASON_STOP
            assert any(output.tool_calls for output in outputs)


async def test_half_a_surrogate_pair_in_the_input_of_a_custom_tool_is_a_replacement_character():
    request = {"model": "fake", "input": "1?", "tools": [{"type": "custom", "name": "add"}]}
    async with running("hermes") as (engine, _, client):
        call = r'{"name": "add", "arguments": {"input": "a\ud83d"}}'
        engine.script = says(f"<tool_call>{call}</tool_call>")
        for stream in (False, True):
            answer = await client.post("/v1/responses", json={**request, "stream": stream})
            assert answer.status_code == 200
            assert '"input":"a\ufffd"' in answer.content.decode()
