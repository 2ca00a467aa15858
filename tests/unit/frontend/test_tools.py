"""Tools in conversations: what the template gets, over gRPC and HTTP, and what is refused."""

import json
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from protos.frontend.v1 import frontend_pb2
from services.client.client import OctavoClient
from services.client.requests import Message, Tool, ToolCall
from tests.support.byte_tokenizer import TOOL_TEMPLATE, reference_tokenizer, tokenizer_files
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function",
     "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}},
]  # fmt: skip
CONVERSATION = [
    {"role": "user", "content": "3 + 4?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a":3,"b":4}'},
            }
        ],
    },
    {"role": "tool", "content": "7", "tool_call_id": "c1"},
]
EXPECTED = (
    "<|im_start|>system\n" + json.dumps(TOOLS[0]) + "\n<|im_end|>\n"
    "<|im_start|>user\n3 + 4?<|im_end|>\n"
    '<|im_start|>assistant\n<call>add {"a": 3, "b": 4}<|im_end|>\n'
    "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
)
MESSAGES = [
    Message(role="user", content="3 + 4?"),
    Message(
        role="assistant",
        tool_calls=[ToolCall(id="c1", name="add", arguments='{"a":3,"b":4}')],
    ),
    Message(role="tool", content="7", tool_call_id="c1"),
]


@asynccontextmanager
async def running(template=TOOL_TEMPLATE, **config):
    files = tokenizer_files(chat_template=template) if template else tokenizer_files()
    async with (
        FakeEngine(files=files) as engine,
        frontend_stack(engine, http_port=0, **config) as stack,
        stack.http_client() as client,
    ):
        yield engine, stack, client


def prompt_of(engine):
    ids = np.frombuffer(engine.submits[-1].prompt_token_ids, "<u4").tolist()
    return reference_tokenizer().decode(ids, skip_special_tokens=False)


def body(**changes):
    return {"model": "fake", "messages": CONVERSATION, "tools": TOOLS, **changes}


async def test_the_template_gets_tools_calls_and_answers_over_http():
    async with running() as (engine, _, client):
        for choice in ({}, {"tool_choice": "auto"}):
            response = await client.post("/v1/chat/completions", json=body(**choice))
            assert response.status_code == 200
            assert prompt_of(engine) == EXPECTED


async def test_calls_that_were_put_together_from_a_stream_can_be_sent_back():
    call = dict(CONVERSATION[1]["tool_calls"][0])
    messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [{**call, "index": 0}]}]
    async with running() as (engine, _, client):
        await client.post("/v1/chat/completions", json=body(messages=[*messages, CONVERSATION[2]]))
        assert prompt_of(engine) == EXPECTED
        call["function"] = {"name": "add", "arguments": ""}  # of a call without arguments
        silent = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [call]}, CONVERSATION[2]]
        await client.post("/v1/chat/completions", json=body(messages=silent))
        assert "<call>add {}<|im_end|>" in prompt_of(engine)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a": 3}', {"a": 3}),
        ("null", {}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": 1}}', {"INVALID_JSON": '{"a": 1}}'}),
        ('{"a": "b', {"INVALID_JSON": '{"a": "b'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}",
         {"INVALID_JSON": '{"a": ' + "[" * 70 + "]" * 70 + "}"}),
        (r'{"a": "\ud83d \ud83d\ude00 \\ud83d"}', {"a": "\ufffd \U0001f600 \\ud83d"}),
    ],
)  # fmt: skip
async def test_a_history_is_never_refused_for_what_the_model_wrote(written, shown):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": written}}
    messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [call]}, CONVERSATION[2]]
    items = [
        {"role": "user", "content": "3 + 4?"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": written},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    expected = f"<call>add {json.dumps(shown, ensure_ascii=False)}<|im_end|>"
    async with running() as (engine, stack, client), OctavoClient(stack.address) as grpc_client:
        answer = await client.post("/v1/chat/completions", json=body(messages=messages))
        assert (answer.status_code, expected in prompt_of(engine)) == (200, True), answer.text
        answer = await client.post("/v1/responses", json={"model": "fake", "input": items})
        assert (answer.status_code, expected in prompt_of(engine)) == (200, True), answer.text
        said = Message(
            role="assistant", tool_calls=[ToolCall(id="c1", name="add", arguments=written)]
        )
        await grpc_client.chat([MESSAGES[0], said, MESSAGES[2]]).completion()
        assert expected in prompt_of(engine)


async def test_half_a_surrogate_pair_in_a_body_is_a_replacement_character():
    text = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "?"}]})
    async with running() as (engine, _, client):
        for written, shown in ((r"\ud83d", "\ufffd"), (r"\\ud83d \udc00", "\\ud83d \ufffd")):
            content = text.replace("?", written)
            answer = await client.post(
                "/v1/chat/completions",
                content=content,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 200, answer.text
            assert f"<|im_start|>user\n{shown}<|im_end|>" in prompt_of(engine)


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning", "reasoning_content"]])
async def test_reasoning_is_sent_back_under_either_name(names):
    template = "{% for m in messages %}({{ m.reasoning_content }}){{ m.content }}{% endfor %}"
    said = {"role": "assistant", "content": "7", **dict.fromkeys(names, "hm")}
    async with running(template) as (engine, _, client):
        asked = {"model": "fake", "messages": [said]}
        answer = await client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert prompt_of(engine) == "(hm)7"
        said["reasoning"], said["reasoning_content"] = "a", "b"
        answer = await client.post("/v1/chat/completions", json=asked)
        assert answer.json()["error"]["param"] == "messages"


async def test_the_tool_choice_none_keeps_tools_from_the_model():
    async with running() as (engine, _, client):
        await client.post("/v1/chat/completions", json=body(tool_choice="none"))
        assert prompt_of(engine) == EXPECTED[EXPECTED.index("<|im_start|>user") :]


async def test_the_template_gets_the_same_over_grpc():
    async with running() as (engine, stack, _), OctavoClient(stack.address) as client:
        tools = [Tool(name="add", description="adds", parameters=json.dumps(PARAMETERS))]
        await client.chat(MESSAGES, tools=tools).completion()
        assert prompt_of(engine) == EXPECTED
        async with client.session() as session:
            await session.chat(MESSAGES, tools=tools).completion()
        assert prompt_of(engine) == EXPECTED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": [*CONVERSATION[:1], CONVERSATION[2]]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{**CONVERSATION[1], "role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c1"}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "", "arguments": "{}"}}]}]},
            "messages",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_by_name(changes, field):
    async with running() as (engine, _, client):
        response = await client.post("/v1/chat/completions", json=body(**changes))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert not engine.submits


async def test_a_template_without_tools_takes_none_in_a_format_without_calls():
    async with running(None, reply_format="plain") as (engine, _, client):
        response = await client.post("/v1/chat/completions", json=body())
        assert response.status_code == 400
        assert "takes no tools" in response.json()["error"]["message"]
        assert not engine.submits


async def test_a_session_lives_on_after_tools_that_are_no_json():
    async with running() as (_, stack, _):
        wrong = frontend_pb2.ChatRequest(
            messages=[{"role": "user", "content": "hello"}],
            tools=[{"name": "add", "parameters": "no json"}],
        )
        call = stack.stub.Session()
        await call.write(frontend_pb2.SessionRequest(handle=1, chat=wrong))
        failure = (await call.read()).failure
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "parameters of the tool 'add'" in failure.message
        wrong.tools[0].parameters = "{}"
        await call.write(frontend_pb2.SessionRequest(handle=1, chat=wrong))
        while not (await call.read()).output.HasField("usage"):
            pass
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_conversation_over_the_limit_counts_its_tools():
    async with running() as (_, _, client):
        tool = {"type": "function", "function": {"name": "f", "description": "x" * 2**20}}
        response = await client.post("/v1/chat/completions", json=body(tools=[tool]))
        assert "the limit is 1048576" in response.json()["error"]["message"]


async def test_a_long_conversation_is_rendered_beside_the_loop():
    async with running() as (_, stack, _), OctavoClient(stack.address) as client:
        messages = [Message(role="user", content="hi")] * 200
        tokens = await client.tokenize(messages)
        assert len(tokens) > 400
