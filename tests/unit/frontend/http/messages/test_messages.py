"""/v1/messages through Anthropic's own client: replies, streams, tools, and what is refused."""

import json
from contextlib import asynccontextmanager

import anthropic
import numpy as np
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from services.frontend.http.messages.schema import MessagesRequest
from services.frontend.pipeline.request_log import CANCELLED
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until

TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.reasoning_content %}{{- "<think>" + message.reasoning_content + "</think>" }}{%- endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking %}{{- "<think>\\n" }}
{%- elif enable_thinking is defined %}{{- "<think></think>" }}{%- endif %}
{%- if reasoning_effort %}{{- reasoning_effort }}{%- endif %}
"""  # noqa: E501
REPLY = (
    "<think>\nSums.\n</think>\n\nI add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
ASK = {"model": "fake", "max_tokens": 400, "messages": [{"role": "user", "content": "1?"}]}
KEYS = '[keys.a]\nkey = "a-long-enough-secret"\nmax_live_requests = 1\n'


@asynccontextmanager
async def running(reply="hello world", template=TEMPLATE, engine=None, **config):
    files = tokenizer_files(chat_template=template)
    async with (
        engine or FakeEngine(script=says(reply), files=files) as running,
        frontend_stack(running, http_port=0, **config) as stack,
        anthropic.AsyncAnthropic(
            base_url=stack.http_url, api_key="a-long-enough-secret", max_retries=0
        ) as client,
    ):
        yield running, stack, client


def prompt_of(engine):
    ids = np.frombuffer(engine.submits[-1].prompt_token_ids, "<u4").tolist()
    return reference_tokenizer().decode(ids, skip_special_tokens=False)


def kinds(message):
    return [block.type for block in message.content]


async def test_a_conversation_is_answered():
    async with running() as (engine, _, client):
        message = await client.messages.create(**ASK, system="Be brief.")
        counted = await client.messages.count_tokens(
            model="fake", messages=ASK["messages"], system="Be brief."
        )
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.text for block in message.content] == ["hello world"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id == message.id
    usage = message.usage
    assert usage.cache_read_input_tokens == 2
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.output_tokens > 1
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
    assert prompt_of(engine) == expected + "<|im_start|>assistant\n"
    assert engine.submits[0].sampling.max_tokens == 400


async def test_a_reply_has_blocks_of_thinking_text_and_calls():
    async with running(REPLY) as (_, _, client):
        message = await client.messages.create(**ASK, tools=TOOLS)
    assert kinds(message) == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert (thinking.thinking, text.text) == ("Sums.", "I add.")
    assert [(call.name, call.input) for call in calls] == [("add", {"a": 1}), ("add", {"a": 2})]
    assert len({call.id for call in calls}) == 2
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("tokens_per_step", [1, 7, 999])
async def test_a_stream_makes_the_same_message(tokens_per_step):
    files = tokenizer_files(chat_template=TEMPLATE)
    reply = REPLY + "\nDone."
    engine = FakeEngine(script=says(reply), files=files, tokens_per_step=tokens_per_step)
    async with running(engine=engine) as (_, _, client):
        whole = await client.messages.create(**ASK, tools=TOOLS)
        async with client.messages.stream(**ASK, tools=TOOLS) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
    own = {"id", "content"}
    assert streamed.model_dump(exclude=own) == whole.model_dump(exclude=own)
    without_id = [block.model_dump(exclude={"id", "parsed_output"}) for block in streamed.content]
    assert without_id == [block.model_dump(exclude={"id"}) for block in whole.content]
    assert "tool_call>" not in "".join(e.text for e in events if e.type == "text")


async def test_the_events_have_anthropics_names_and_order():
    async with (
        running(REPLY) as (_, stack, _),
        stack.http_client() as client,
    ):
        body = {**ASK, "tools": TOOLS, "stream": True}
        async with client.stream("POST", "/v1/messages", json=body) as response:
            lines = [line async for line in response.aiter_lines()]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[2::3] == [""] * (len(lines) // 3)
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::3]]
    assert [line.removeprefix("event: ") for line in lines[::3]] == [e["type"] for e in events]
    assert [e["type"] for e in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [e["type"] for e in events[-3:]] == [
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    opened = None
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                opened = event["index"]
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
            case kind:
                assert (kind, event["index"]) == ("content_block_delta", opened)
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [each["type"] for each in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2] == {"type": "tool_use", "id": starts[2]["id"], "name": "add", "input": {}}
    assert {e["delta"]["type"] for e in events if e["type"] == "content_block_delta"} == {
        "thinking_delta", "text_delta", "input_json_delta",
    }  # fmt: skip
    delta = events[-2]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 1


async def test_the_stop_reason_says_what_ended_the_reply():
    async with running("one two three four") as (_, _, client):
        stopped = await client.messages.create(**ASK, stop_sequences=["nine", "three"])
        cut = await client.messages.create(**ASK | {"max_tokens": 2})
        async with client.messages.stream(**ASK, stop_sequences=["three"]) as stream:
            streamed = await stream.get_final_message()
    for message in (stopped, streamed):
        assert message.content[0].text == "one two "
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


async def test_what_was_answered_can_be_sent_back():
    async with running(REPLY) as (engine, _, client):
        first = await client.messages.create(**ASK, tools=TOOLS)
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "3",
             "cache_control": {"type": "ephemeral"}},
            {"type": "tool_result", "tool_use_id": calls[1].id, "is_error": True,
             "content": [{"type": "text", "text": "too "}, {"type": "text", "text": "big"}]},
            {"type": "text", "text": "Go on."},
        ]  # fmt: skip
        for content in (first.content, [block.model_dump() for block in first.content]):
            turns = [
                *ASK["messages"],
                {"role": "assistant", "content": content},
                {"role": "user", "content": results},
            ]
            await client.messages.create(**ASK | {"messages": turns}, tools=TOOLS)
            assert prompt_of(engine).partition("1?<|im_end|>\n")[2] == (
                "<|im_start|>assistant\n<think>Sums.</think>I add."
                '<tool_call>add{"a": 1}</tool_call><tool_call>add{"a": 2}</tool_call><|im_end|>\n'
                "<|im_start|>tool\n3<|im_end|>\n"
                "<|im_start|>tool\nError: too big<|im_end|>\n"
                "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
            )


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a": 1', {"INVALID_JSON": '{"a": 1'}),
        ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        ("null", {}),
    ],
)
async def test_input_that_is_no_object_comes_back_as_it_was_written(written, shown):
    reply = '<tool_call>\n{"name": "add", "arguments": ' + written
    if written[-1] in "}l":
        reply += "}\n</tool_call>"
    async with running(reply) as (engine, _, client):
        message = await client.messages.create(**ASK, tools=TOOLS)
        assert message.content[0].input == shown
        turns = [*ASK["messages"], {"role": "assistant", "content": message.content}]
        turns.append(
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "no"}]}
        )  # fmt: skip
        await client.messages.create(**ASK | {"messages": turns}, tools=TOOLS)
        assert f"<tool_call>add{json.dumps(shown, ensure_ascii=False)}" in prompt_of(engine)


@pytest.mark.parametrize(
    ("choice", "begins"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
    ],
)
async def test_a_tool_choice_becomes_a_grammar(choice, begins):
    async with running(REPLY) as (engine, _, client):
        await client.messages.create(**ASK, tools=TOOLS, tool_choice=choice)
        tagged = engine.submits[-1].sampling.structured_output.tagged
    assert tagged.tags
    assert (not tagged.triggers) is begins
    assert '"name": "add"' in prompt_of(engine)


async def test_the_choice_none_keeps_tools_from_the_model():
    async with running() as (engine, _, client):
        await client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
    assert '"name"' not in prompt_of(engine)
    assert not engine.submits[-1].sampling.HasField("structured_output")


async def test_thinking_is_turned_on_and_off_and_nothing_is_ignored():
    async with running("Sums.</think>4") as (engine, _, client):
        on = await client.messages.create(**ASK, thinking={"type": "adaptive"})
        assert prompt_of(engine).endswith("assistant\n<think>\n")
        budget = {"type": "enabled", "budget_tokens": 1024}
        await client.messages.create(**ASK, thinking=budget)
        assert prompt_of(engine).endswith("assistant\n<think>\n")
        wanted = engine.submits[-1].sampling.structured_output
        assert wanted.preamble.max_tokens == 1024
        await client.messages.create(**ASK, thinking={"type": "disabled"})
        assert prompt_of(engine).endswith("assistant\n<think></think>")
        await client.messages.create(**ASK, output_config={"effort": "low"})
        assert prompt_of(engine).endswith("assistant\nlow")
    assert [block.type for block in on.content] == ["thinking", "text"]


async def test_strict_fields_refuse_thinking_that_the_model_cannot_do():
    template = "{{ messages[0].content }}"
    async with running(template=template, strict_fields=True) as (engine, _, client):
        with pytest.raises(anthropic.BadRequestError, match="thinking: the model"):
            await client.messages.create(**ASK, thinking={"type": "adaptive"})
    assert not engine.submits


async def test_thinking_that_the_template_cannot_turn_off_ends_at_once():
    template = "{{ messages[0].content }}<think>{# </think> #}"
    async with running("</think>4", template=template) as (engine, _, client):
        message = await client.messages.create(**ASK, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]
    assert engine.submits[-1].sampling.structured_output.preamble.HasField("max_tokens")


async def test_a_schema_shapes_the_answer():
    async with running() as (engine, _, client):
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        await client.messages.create(**ASK, output_config=form)
    assert json.loads(engine.submits[-1].sampling.structured_output.json_schema) == SCHEMA


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


def said(*blocks, role="user"):
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "0 messages"),
        (said(IMAGE), "the model 'fake' takes text: it sees no images"),
        (said(DOCUMENT), "messages.0.content.0: 'document' is not supported"),
        (said({"type": "tool_use", "id": "c", "name": "f", "input": {}}), "'tool_use'"),
        (
            said({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}),
            "the model 'fake' takes text: it sees no images",
        ),
        (said({"type": "tool_result", "tool_use_id": "c", "content": "7"}), "tool_call"),
        (said({"type": "text"}), "messages.0.content.0.text: Field required"),
        (said({"type": "text", "text": "x"}, role="tool"), "messages.0: 'tool' is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search'"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools: 'computer' is"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice names"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"container": {"skills": []}}, "container: Input should be a valid string"),
        ({"output_config": {"effort": "low"}, "n": 2}, "n: Extra inputs are not permitted"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(changes, words):
    async with (
        running() as (engine, stack, _),
        stack.http_client() as client,
    ):
        response = await client.post("/v1/messages", json=ASK | changes)
    told = response.json()
    assert (response.status_code, told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert words in told["error"]["message"]
    assert told["request_id"] == response.headers["request-id"]
    assert not engine.submits


CHANGES = {
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "another"}],
    "model": "another",
    "system": "brief",
    "tools": TOOLS,
    "stop_sequences": ["wor"],
    "temperature": 0.25,
    "top_p": 0.25,
    "top_k": 3,
    "stream": True,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "tool_choice": {"type": "auto"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
}
REFUSED = {"thread", "mcp_servers"}
WITHOUT_EFFECT = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "betas": ["context-management-2025-06-27"],
    "speed": "fast",
    "container": "c",
    "inference_geo": "eu",
    "diagnostics": {"previous_message_id": None},
    "fallbacks": [{"model": "other"}],
    "fallback_credit_token": "t",
    "user_profile_id": "u",
    "workspace_id": "w",
}


async def test_every_field_is_honoured_refused_or_on_the_list_of_those_without_effect():
    params = (
        *message_create_params.MessageCreateParamsStreaming.__mro__,
        *message_count_tokens_params.MessageCountTokensParams.__mro__,
    )
    fields = {name for base in params for name in getattr(base, "__annotations__", {})}
    known = CHANGES.keys() | WITHOUT_EFFECT.keys() | REFUSED
    assert set(MessagesRequest.model_fields) == known
    async with (
        running() as (engine, stack, _),
        stack.http_client() as client,
    ):

        async def effect(**changes):
            engine.submits.clear()
            response = await client.post("/v1/messages", json=ASK | changes)
            for submit in engine.submits:
                submit.ClearField("request_id")
                submit.ClearField("handle")
                submit.sampling.ClearField("seed")
            kind = response.headers["content-type"]
            told = response.json() if kind == "application/json" else {}
            shown = {name: told.get(name) for name in ("content", "context_management")}
            return response.status_code, kind, shown, list(engine.submits)

        ordinary = await effect()
        for name in sorted(fields | set(MessagesRequest.model_fields)):
            if name in WITHOUT_EFFECT:
                assert await effect(**{name: WITHOUT_EFFECT[name]}) == ordinary, name
            else:
                status, *told = await effect(**{name: CHANGES.get(name, "text")})
                assert [status, *told] != list(ordinary), f"{name} is ignored"
                assert name in CHANGES or status == 400, name
        assert await effect(**dict.fromkeys(fields - ASK.keys())) == ordinary


async def test_errors_are_those_that_the_client_knows(tmp_path):
    key_file = tmp_path / "keys.toml"
    key_file.write_text(KEYS)
    key_file.chmod(0o600)
    async with running(api_keys_file=key_file, max_message_bytes=2**16) as (engine, stack, client):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**ASK | {"model": "other"})
        with pytest.raises(anthropic.APIStatusError) as large:
            await client.messages.create(**ASK, system="x" * 2**16)
        with pytest.raises(anthropic.AuthenticationError) as stranger:
            await client.with_options(api_key="wrong").messages.create(**ASK)
        with pytest.raises(anthropic.BadRequestError) as old:
            await client.messages.create(**ASK, extra_headers={"anthropic-version": "2023-01-01"})
        bearer = anthropic.AsyncAnthropic(
            base_url=stack.http_url, auth_token="a-long-enough-secret"
        )
        async with bearer:
            await bearer.messages.create(**ASK)
        engine.pause()
        async with client.messages.stream(**ASK):
            with pytest.raises(anthropic.RateLimitError) as busy:
                await client.messages.create(**ASK)
            engine.resume()
        async with stack.http_client() as plain:
            key = {"x-api-key": "a-long-enough-secret"}
            wrong_method = (await plain.get("/v1/messages", headers=key)).json()
            chat = (await plain.get("/v1/chat/completions", headers=key)).json()
    kinds = [each.value.body["error"]["type"] for each in (unknown, large, stranger, old, busy)]
    assert kinds == [
        "not_found_error", "request_too_large", "authentication_error", "invalid_request_error",
        "rate_limit_error",
    ]  # fmt: skip
    assert large.value.status_code == 413
    assert busy.value.response.headers["retry-after"] == "1"
    assert wrong_method["type"] == "error"
    assert chat["error"]["param"] is None


async def until_broken(client, engine):
    async with client.messages.stream(**ASK) as stream:
        async for event in stream:
            if event.type == "text":
                await engine.die()


async def test_a_stream_that_fails_ends_with_an_error_event():
    engine = FakeEngine(script=says("one " * 100, eos=False), hold_at=3)
    async with running(engine=engine, max_engine_attempts=1) as (_, _, client):
        with pytest.raises(anthropic.APIStatusError) as failure:
            await until_broken(client, engine)
    assert failure.value.body["error"]["type"] == "overloaded_error"


async def test_a_client_that_goes_away_ends_its_request_and_requests_are_counted():
    engine = FakeEngine(script=says("one " * 100, eos=False), hold_at=3)
    async with running(engine=engine) as (_, stack, client):
        counts = stack.server.requests.counts
        async with client.messages.stream(**ASK) as stream:
            async for event in stream:
                if event.type == "text":
                    break
            assert counts.num_live == 1
        await until(lambda: len(engine.aborted) == 1)
        await until(lambda: counts.failed[CANCELLED] == 1)
        engine.hold_at = None
        await client.messages.create(**ASK)
    assert counts.finished == {"length": 1}


async def test_a_large_body_is_read_in_a_process_alike():
    async with running() as (engine, _, client):
        blocks = [{"type": "text", "text": "a"} for _ in range(3000)]
        turns = [{"role": "user", "content": blocks}]
        small = await client.messages.count_tokens(
            model="fake", messages=[{"role": "user", "content": "a" * 3000}]
        )
        large = await client.messages.count_tokens(model="fake", messages=turns)
        assert large.input_tokens == small.input_tokens
        edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        edited = await client.beta.messages.count_tokens(
            model="fake", messages=turns, context_management=edits
        )
        assert edited.context_management.original_input_tokens == small.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="tokens"):
            await client.messages.create(**ASK | {"messages": turns})
    assert not engine.submits
