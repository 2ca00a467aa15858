"""No field of a client's request is ignored: each changes what the engine is asked or what comes
back, or is refused. Over gRPC every field of the messages, over HTTP every field of the schema, and
every one that the openai client knows.
"""

import json
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from protos.frontend.v1 import frontend_pb2
from services.frontend.http.chat.schema import ChatCompletionRequest
from services.frontend.http.completions.schema import CompletionRequest
from services.frontend.http.fields.inert import InertFields
from tests.support.byte_tokenizer import TOOL_TEMPLATE, tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.support.field_walk import leaf_paths, set_field
from tests.support.frontend_stack import frontend_stack
from tests.unit.engine.edge.test_every_field import VALUES as SAMPLING_VALUES

VALUES = {
    "options.model": "another",
    "options.request_id": "another",
    "options.stop": ["wor"],
    "options.priority": 3,
    "options.cache_salt": "tenant",
    "options.show_special_tokens": True,
    "options.show_stop": True,
    "options.truncate_prompt_tokens": 1,
    "options.bad_words": ["wor"],
    "options.n": 2,
    "options.parse_special_tokens": False,
    "options.traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "text": "another",
    "tokens.ids": [7, 8],
    "messages.role": "narrator",
    "messages.content": "another",
    "messages.tool_calls.id": "call",
    "messages.tool_calls.name": "add",
    "messages.tool_calls.arguments": "{}",
    "messages.tool_call_id": "call",
    "messages.reasoning": "because",
    "messages.parts.text": "another",
    "messages.parts.image": b"another",
    "messages.parts.image_url": "https://another.test/",
    "tools.strict": True,
    "tool_use": frontend_pb2.TOOL_USE_REQUIRED,
    "required_tool": "add",
    "parallel_tool_calls": False,
    "max_reasoning_tokens": 0,
    "prompt_end": frontend_pb2.PROMPT_END_MESSAGES,
    "template_variables": '{"colour": true}',
    "tools.name": "add",
    "tools.description": "adds",
    "tools.parameters": "{}",
} | {f"options.{p}": value for p, value in SAMPLING_VALUES.items() if p.startswith("sampling.")}

CHAT_VALUES = VALUES | {"options.parse_special_tokens": True}

GENERATE = frontend_pb2.GenerateRequest(
    text="one <|im_end|> two",
    options={"request_id": "r", "stop": ["ld"], "sampling": {"seed": 1, "max_tokens": 30}},
)
CHAT = frontend_pb2.ChatRequest(
    messages=[{"role": "user", "content": "hello<|im_end|>"}],
    options={"request_id": "r", "stop": ["ld"], "sampling": {"seed": 1, "max_tokens": 30}},
)


REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


class Refused(Exception):  # noqa: N818  an outcome, not an error
    """The field was answered with a refusal."""


@asynccontextmanager
async def running():
    async with (
        FakeEngine(
            script=says("hello<|im_start|> world"),
            tokens_per_step=99,
            files=tokenizer_files(chat_template=TOOL_TEMPLATE),
        ) as engine,
        # A format with reasoning, so that its limit has an effect.
        frontend_stack(engine, http_port=0, reply_format="harmony") as stack,
    ):
        yield engine, stack


def submits_of(engine):
    """The engine's requests since the last look, without the fields that differ each time."""
    submits = list(engine.submits)
    engine.submits.clear()
    for submit in submits:
        submit.ClearField("handle")
    return submits


def paths(message_class):
    return [".".join(path) for path in leaf_paths(message_class.DESCRIPTOR)]


async def test_every_field_over_grpc():
    async with running() as (engine, stack):

        async def effect(request):
            method = stack.stub.Chat if isinstance(request, frontend_pb2.ChatRequest) else None
            call = (method or stack.stub.Generate)(request)
            try:
                return [r.output async for r in call], submits_of(engine)
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSALS:
                    raise Refused from None
                raise

        for baseline, values in ((GENERATE, VALUES), (CHAT, CHAT_VALUES)):
            ordinary = await effect(baseline)
            assert ordinary == await effect(baseline)
            for path in paths(type(baseline)):
                changed = type(baseline)()
                changed.CopyFrom(baseline)
                set_field(changed, tuple(path.split(".")), values[path])
                with suppress(Refused):
                    assert await effect(changed) != ordinary, f"{path} is ignored"


HTTP_VALUES = {
    "model": ["another"],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "max_tokens": [3],
    "max_completion_tokens": [3],
    "temperature": [0.25],
    "top_p": [0.5],
    "seed": [12],
    "stop": ["wor"],
    "include_stop_str_in_output": [True],
    "frequency_penalty": [0.5],
    "presence_penalty": [0.5],
    "logit_bias": [{"5": 1.5}],
    "n": [2],
    "best_of": [2],
    "echo": [True],
    "logprobs": [True, 1],
    "top_logprobs": [2],
    "modalities": [["audio"]],
    "suffix": ["end"],
    "prompt": ["another"],
    "messages": [[{"role": "user", "content": "another"}]],
    "response_format": [{"type": "json_object"}],
    "top_k": [3],
    "min_p": [0.5],
    "repetition_penalty": [1.5],
    "min_tokens": [2],
    "ignore_eos": [True],
    "stop_token_ids": [[6]],
    "prompt_logprobs": [0],
    "truncate_prompt_tokens": [1],
    "allowed_token_ids": [[5, 6]],
    "num_speculative_tokens": [1],
    "structured_outputs": [{"regex": "a"}],
    "cache_salt": ["tenant"],
    "parse_special_tokens": [True, False],
    "tools": [[{"type": "function", "function": {"name": "add"}}]],
    "tool_choice": ["required"],
    "chat_template_kwargs": [{"colour": True}],
    "max_reasoning_tokens": [0],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "use_beam_search": [True],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "priority": [1],
    "length_penalty": [0.5],
    "bad_words": [["a"]],
    "separate_reasoning": [False],
    "stream_reasoning": [False],
    "add_special_tokens": [True, False],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "include_reasoning": [False],
}
"""Values for every field of the schema that are not what its absence means."""

BODIES = {
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [{"role": "user", "content": "hello<|im_end|>"}],
        "stop": "ld",
    },
    "/v1/completions": {"model": "fake", "prompt": "one <|im_end|> two", "stop": "ld"},
}
INERT = {
    *InertFields.model_fields,
    *("prediction", "verbosity", "reasoning_effort", "parallel_tool_calls"),
}
"""Fields that cannot change an answer; `verbosity` and `reasoning_effort` can where a chat template
knows them, and `parallel_tool_calls` where there are tools."""
DEFAULTS = {
    ("/v1/chat/completions", "parse_special_tokens"): False,
    ("/v1/completions", "parse_special_tokens"): True,
    ("/v1/chat/completions", "add_special_tokens"): False,
    ("/v1/completions", "add_special_tokens"): True,
}
"""Values above that are what the field's absence means."""

SCHEMAS = {
    "/v1/chat/completions": (
        ChatCompletionRequest, chat_create_params.CompletionCreateParamsStreaming,
    ),
    "/v1/completions": (
        CompletionRequest, completion_create_params.CompletionCreateParamsStreaming,
    ),
}  # fmt: skip
ANYTHING = ["text", 1, True, {"a": 1}, [1]]


@pytest.mark.parametrize("path", BODIES)
async def test_every_field_over_http(path):
    schema, openai_params = SCHEMAS[path]
    known = set(schema.model_fields)
    fields = known | _annotations(openai_params)
    body = BODIES[path] | {"seed": 1}
    async with (
        running() as (engine, stack),
        stack.http_client() as client,
    ):

        async def effect(changed):
            response = await client.post(path, json=changed)
            told = {**response.json(), "id": "", "created": 0} if "stream" not in changed else ""
            submits = submits_of(engine)
            for submit in submits:
                submit.ClearField("request_id")
            return response.status_code, told, submits

        ordinary = await effect(body)
        assert ordinary == await effect(body)
        for name in sorted(fields - INERT):
            values = HTTP_VALUES[name] if name in known else ANYTHING
            for value in values:
                if DEFAULTS.get((path, name)) is value:
                    continue
                status, told, submits = await effect(body | {name: value})
                if status in (400, 404):
                    assert told["error"]["param"] in (name, None), (name, told)
                    assert not submits
                else:
                    assert name in known, f"{name} is ignored"
                    assert (status, told, submits) != ordinary, f"{name} is ignored"


def _annotations(params) -> set[str]:
    return {name for base in params.__mro__ for name in getattr(base, "__annotations__", {})}


async def test_an_unknown_field_is_refused_by_name():
    async with (
        running() as (_, stack),
        stack.http_client() as client,
    ):
        for path, body in BODIES.items():
            response = await client.post(path, content=json.dumps(body | {"wish": 1}), headers={
                "content-type": "application/json"})  # fmt: skip
            assert response.json()["error"]["param"] == "wish"


async def test_every_field_of_tokenize_and_detokenize():
    async with running() as (_, stack):
        chat = frontend_pb2.Conversation(messages=[{"role": "user", "content": "hello<|im_end|>"}])
        for method, baseline, values in (
            (
                stack.stub.Tokenize,
                frontend_pb2.TokenizeRequest(conversation=chat),
                {"model": "x", "text": "a", "parse_special_tokens": True}
                | {f"conversation.{p}": v for p, v in VALUES.items()},
            ),
            (
                stack.stub.Detokenize,
                frontend_pb2.DetokenizeRequest(token_ids=[40, 0, 41]),
                {"model": "x", "token_ids": [42], "show_special_tokens": True},
            ),
        ):
            ordinary = await method(baseline)
            for path in paths(type(baseline)):
                changed = type(baseline)()
                changed.CopyFrom(baseline)
                set_field(changed, tuple(path.split(".")), values[path])
                try:
                    told = await method(changed)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in REFUSALS:
                        raise
                else:
                    assert told != ordinary, f"{path} is ignored"
