"""Fields that coding agents send to /v1/messages, on models that can follow them and others."""

import json

import anthropic
import pytest

from tests.support.byte_tokenizer import tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.unit.frontend.http.messages.test_messages import (
    ASK,
    REPLY,
    TEMPLATE,
    TOOLS,
    kinds,
    prompt_of,
    running,
)

PATH = "/v1/messages?beta=true"
PLAIN = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
)
"""A template without tools, reasoning or variables."""
TOOLS_ALONE = "\n".join(
    line for line in TEMPLATE.splitlines() if "think" not in line and "effort" not in line
)
"""A template with tools, without reasoning."""
AGENT = {
    "model": "fake",
    "max_tokens": 400,
    "system": [
        {"type": "text", "text": "You write code.",
         "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Two skills."},
    ],
    "tools": [
        {"name": "add", "description": "adds", "input_schema": {"type": "object"}},
        {"name": "sub", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "metadata": {"user_id": "u"},
    "stream": True,
}  # fmt: skip
"""Fields as Claude Code 2.1 sends them with its first prompt."""


def engine_of(reply="hello", template=TEMPLATE):
    """Returns an engine whose context has room for tools and their description."""
    files = tokenizer_files(chat_template=template)
    return FakeEngine(script=says(reply), files=files, max_model_len=8192)


def events_of(response):
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("template", [TEMPLATE, TOOLS_ALONE, PLAIN])
async def test_the_first_request_of_an_agent_is_served(template):
    async with (
        running(engine=engine_of(REPLY, template)) as (engine, stack, _),
        stack.http_client() as client,
    ):
        response = await client.post(PATH, json=AGENT)
        prompt = prompt_of(engine)
        left_out = stack.server.requests.counts.left_out
    events = events_of(response)
    blocks = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    calls = [block["name"] for block in blocks if block["type"] == "tool_use"]
    assert calls == ["add", "add"]
    [end] = [each for each in events if each["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use"
    assert end["context_management"] == {"applied_edits": []}
    assert all(word in prompt for word in ("You write code.", "Two skills.", '"sub"', "hi"))
    assert "web_search" not in prompt
    assert left_out == {"web_search": 1}


async def test_omitted_thinking_has_blocks_without_text():
    omitted = {"type": "adaptive", "display": "omitted"}
    async with running("Sums.</think>4") as (_, _, client):
        whole = await client.messages.create(**ASK, thinking=omitted)
        async with client.messages.stream(**ASK, thinking=omitted) as stream:
            streamed = await stream.get_final_message()
        shown = await client.messages.create(
            **ASK, thinking={"type": "enabled", "budget_tokens": 64, "display": "summarized"}
        )
    for message in (whole, streamed):
        assert kinds(message) == ["thinking", "text"]
        assert message.content[0].thinking == ""
        assert message.content[1].text == "4"
    assert whole.usage.output_tokens == shown.usage.output_tokens
    assert shown.content[0].thinking == "Sums."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_management": AGENT["context_management"]}, "context_management: Extra inputs"),
        ({"tools": AGENT["tools"][:2]}, "defer_loading: Extra inputs are not permitted"),
        ({"tools": AGENT["tools"][::2]}, "web_search"),
        ({"output_config": {"effort": "high"}}, "reasoning_effort"),
        ({"thinking": {"type": "adaptive"}}, "does not reason"),
        ({"betas": ["x"]}, "betas: Extra inputs are not permitted"),
    ],
)
async def test_strict_fields_refuse_what_nothing_here_can_follow(changes, words):
    async with (
        running(template=PLAIN, strict_fields=True) as (engine, stack, _),
        stack.http_client() as client,
    ):
        response = await client.post(PATH, json=ASK | changes)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not engine.submits


@pytest.mark.parametrize("strict_fields", [False, True])
async def test_a_thread_is_refused_with_the_code_that_clients_fall_back_on(strict_fields):
    async with running(strict_fields=strict_fields) as (_, _, client):
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.beta.messages.create(**ASK, extra_body={"thread": {"type": "create"}})
    details = refused.value.body["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}


async def test_a_prompt_that_is_too_long_is_refused_in_words_that_make_agents_shorten_it():
    async with running() as (_, _, client):
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 512"
        ):
            await client.messages.create(**ASK, system="one " * 600)


async def test_the_history_of_another_server_is_taken():
    content = [
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "thinking", "thinking": "Sums.", "signature": "s"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "I add.", "citations": [{"type": "char_location"}]},
        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1},
         "caller": {"type": "direct"}},
    ]  # fmt: skip
    found = [{"type": "tool_reference", "tool_name": "sub"}]
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}],
        },
    ]
    async with (
        running(engine=engine_of(template=PLAIN)) as (engine, stack, _),
        stack.http_client() as client,
    ):
        response = await client.post(PATH, json=ASK | {"messages": turns, "tools": TOOLS})
        assert response.status_code == 200
        said = prompt_of(engine).partition("1?<|im_end|>\n")[2]
    assert said == (
        '<|im_start|>assistant\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nsub\n\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
async def test_a_tool_that_the_vendor_names_and_the_client_runs_is_a_function(kind):
    reply = '<tool_call>\n{"name": "run", "arguments": {"command": "view"}}\n</tool_call>'
    async with running(engine=engine_of(reply)) as (engine, _, client):
        message = await client.messages.create(**ASK, tools=[{"type": kind, "name": "run"}])
        prompt = prompt_of(engine)
    assert message.content[0].input == {"command": "view"}
    assert '"name": "run"' in prompt
    assert '"command"' in prompt


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"tools": AGENT["tools"], "tool_choice": {"type": "tool", "name": "web_search"}},
            "choice",
        ),
        ({"tools": AGENT["tools"][2:]}, "tools"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "'mcp'"),
    ],
)
async def test_a_hosted_tool_alone_or_demanded_is_refused_by_name(changes, field):
    async with running() as (engine, _, client):
        with pytest.raises(anthropic.BadRequestError, match=field):
            await client.messages.create(**ASK, extra_body=changes)
    assert not engine.submits


def thought(number):
    return [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": f"Sums {number}.", "signature": ""},
            {"type": "tool_use", "id": f"c{number}", "name": "add", "input": {"a": number}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"Result {number}."}]},
        {"role": "assistant", "content": "So."},
    ]  # fmt: skip


HISTORY = [*thought(1), *thought(2), {"role": "user", "content": "3?"}]


async def _edit(client, *edits, **more):
    return await client.beta.messages.create(
        **ASK | {"messages": HISTORY},
        context_management={"edits": list(edits)},
        tools=TOOLS,
        **more,
    )


async def test_cleared_thinking_leaves_the_prompt_and_is_reported():
    async with running() as (engine, _, client):
        message = await _edit(client, {"type": "clear_thinking_20251015"})
        prompt = prompt_of(engine)
        stream = await _edit(client, {"type": "clear_thinking_20251015"}, stream=True)
        ends = [each.context_management async for each in stream if each.type == "message_delta"]
        await _edit(
            client,
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
        )
        kept = prompt_of(engine)
        counted = await client.beta.messages.count_tokens(
            model="fake",
            messages=HISTORY,
            tools=TOOLS,
            context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        )
    [edit] = message.context_management.applied_edits
    assert (edit.type, edit.cleared_thinking_turns) == ("clear_thinking_20251015", 1)
    assert "Sums 1." not in prompt
    assert "Sums 2." in prompt
    assert ends == [message.context_management]
    assert "Sums 1." in kept
    original = counted.context_management.original_input_tokens
    assert original - counted.input_tokens == edit.cleared_input_tokens > 0


async def test_cleared_results_of_tools_leave_the_prompt_and_are_reported():
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": 1},
    }
    async with running() as (engine, _, client):
        message = await _edit(client, edit)
        prompt = prompt_of(engine)
        await _edit(client, edit | {"clear_tool_inputs": True})
        without_input = prompt_of(engine)
        unchanged = [
            await _edit(client, edit | changes)
            for changes in (
                {"trigger": {"type": "tool_uses", "value": 3}},
                {"trigger": {"type": "input_tokens", "value": 100_000}},
                {"exclude_tools": ["add"]},
                {"clear_at_least": {"type": "input_tokens", "value": 5000}},
            )
        ]
        assert "Result 1." in prompt_of(engine)
    [applied] = message.context_management.applied_edits
    assert applied.cleared_tool_uses == 1
    assert "Result 1." not in prompt
    assert "Result 2." in prompt
    assert '{"a": 1}' in prompt
    assert '{"a": 1}' not in without_input
    assert all(not each.context_management.applied_edits for each in unchanged)
