"""A null is an absent field, at every depth; what we answer can be sent back as it is."""

import copy
import json

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import chat as chat_types

from services.frontend.errors import InvalidRequestError
from services.frontend.http.chat import schema as chat_schema
from services.frontend.http.chat.schema import ChatCompletionRequest
from services.frontend.http.completions import schema as completion_schema
from services.frontend.http.completions.schema import CompletionRequest
from services.frontend.http.fields import generation
from services.frontend.http.fields.body import Body
from services.frontend.http.fields.generation import parse
from tests.support.byte_tokenizer import TOOL_TEMPLATE, reference_tokenizer, tokenizer_files
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

CHAT = {
    "model": "fake",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": "calling",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"default": None}},
        }
    ],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "structured_outputs": {"choice": ["a"]},
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION = {"model": "fake", "prompt": "one", "structured_outputs": {"regex": "a"}, "n": 2}
UNKNOWN = ["refusal", "audio", "function_call", "thinking_blocks", "wish"]


def objects_of(value, *, of_caller=False):
    """All objects of a body but the ones with keys of the caller's own."""
    if isinstance(value, dict) and not of_caller:
        yield value
        for name, each in value.items():
            yield from objects_of(each, of_caller=name in ("parameters", "schema", "json"))
    elif isinstance(value, list):
        for each in value:
            yield from objects_of(each)


def outcome(schema, body):
    try:
        return parse(schema, json.dumps(body).encode()).model_dump(exclude_none=True)
    except InvalidRequestError as error:
        return error.field


@pytest.mark.parametrize(
    ("schema", "body"), [(ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)]
)
@given(data=st.data())
def test_a_null_is_an_absent_field_at_every_depth(schema, body, data):
    nulled = copy.deepcopy(body)
    place = data.draw(st.sampled_from(list(objects_of(nulled))))
    known = {
        name for model in _models() for name, field in model.model_fields.items()
        if not field.is_required()
    }  # fmt: skip
    name = data.draw(
        st.sampled_from(sorted({*UNKNOWN, *place, *known} - {"schema_", "json_schema"}))
    )
    absent = copy.deepcopy(nulled)
    [twin] = [
        other for here, other in zip(objects_of(nulled), objects_of(absent), strict=True)
        if here is place
    ]  # fmt: skip
    twin.pop(name, None)
    place[name] = None
    assert outcome(schema, nulled) == outcome(schema, absent)


def _models():
    return [
        each for module in (chat_schema, completion_schema, generation)
        for each in vars(module).values() if isinstance(each, type) and issubclass(each, Body)
    ]  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_field_that_says_something_is_refused_at_every_depth(name):
    for index in range(len(list(objects_of(CHAT)))):
        body = copy.deepcopy(CHAT)
        list(objects_of(body))[index][name] = "x"
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported"):
            parse(ChatCompletionRequest, json.dumps(body).encode())


async def test_what_was_answered_can_be_sent_back():
    files = tokenizer_files(chat_template=TOOL_TEMPLATE)
    async with (
        FakeEngine(files=files) as engine,
        frontend_stack(engine, http_port=0) as stack,
        openai.AsyncOpenAI(base_url=stack.http_url + "/v1", api_key="x", max_retries=0) as client,
    ):
        messages: list = [{"role": "user", "content": "hello"}]
        first = await client.chat.completions.create(model="fake", messages=messages, logprobs=True)
        message = first.choices[0].message
        for echoed in (
            message,
            message.model_dump(),
            message.to_dict(),
            {**message.model_dump(), "annotations": []},
            chat_types.ChatCompletionMessage(role="assistant", content="hello").model_dump(),
        ):
            again = await client.chat.completions.create(
                model="fake", messages=[*messages, echoed, messages[0]]
            )
            assert again.choices[0].message.content == message.content

        deltas: dict = {}
        stream = await client.chat.completions.create(model="fake", messages=messages, stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta.model_dump()
            content = (deltas.get("content") or "") + (delta["content"] or "")
            deltas |= {name: value for name, value in delta.items() if name not in deltas or value}
            deltas["content"] = content
        await client.chat.completions.create(model="fake", messages=[*messages, deltas])

        call = chat_types.ChatCompletionMessageFunctionToolCall.model_validate(
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        )
        calling = chat_types.ChatCompletionMessage(role="assistant", tool_calls=[call])
        result = {"role": "tool", "content": "7", "tool_call_id": "c"}
        await client.chat.completions.create(model="fake", messages=[*messages, calling, result])


async def test_every_optional_parameter_of_the_client_may_be_null():
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, http_port=0) as stack,
        stack.http_client() as client,
    ):
        for path, params, body in (
            (
                "/v1/chat/completions",
                chat_types.completion_create_params.CompletionCreateParamsNonStreaming,
                {"model": "fake", "messages": [{"role": "user", "content": "hello"}]},
            ),
            (
                "/v1/completions",
                openai.types.completion_create_params.CompletionCreateParamsNonStreaming,
                {"model": "fake", "prompt": "one"},
            ),
        ):
            names = {n for base in params.__mro__ for n in getattr(base, "__annotations__", {})}
            response = await client.post(path, json=dict.fromkeys(names) | body)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("given", [{}, {"null": None}, {"empty": ""}])
async def test_a_call_without_arguments_has_an_empty_object(given):
    [value] = given.values() or [None]
    arguments = {"arguments": value} if given else {}
    hello, result = {"role": "user", "content": "hello"}, {"role": "tool", "content": "7"}
    call = {"id": "c", "type": "function", "function": {"name": "f", **arguments}}
    item = {"type": "function_call", "call_id": "c", "name": "f", **arguments}
    block = {"type": "tool_use", "id": "c", "name": "f", **({"input": None} if given else {})}
    files = tokenizer_files(chat_template=TOOL_TEMPLATE)
    async with (
        FakeEngine(files=files) as engine,
        frontend_stack(engine, http_port=0) as stack,
        stack.http_client() as client,
    ):
        for path, body in (
            ("/v1/chat/completions", {"messages": [
                hello, {"role": "assistant", "tool_calls": [call]}, result | {"tool_call_id": "c"}
            ]}),
            ("/v1/responses", {"input": [
                hello, item, {"type": "function_call_output", "call_id": "c", "output": "7"}
            ]}),
            ("/v1/messages", {"max_tokens": 4, "messages": [
                hello, {"role": "assistant", "content": [block]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "7"}
                ]},
            ]}),
        ):  # fmt: skip
            response = await client.post(path, json={"model": "fake", **body})
            assert response.status_code == 200, response.text
            ids = np.frombuffer(engine.submits[-1].prompt_token_ids, "<u4").tolist()
            assert "<call>f {}" in reference_tokenizer().decode(ids, skip_special_tokens=False)
