"""Tool calls of real services: a copy of the embedded model with a chat template that has tools.

The model was never taught tools: its calls are right because the grammar leaves nothing else.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator

import anthropic
import grpc
import jsonschema
import openai
import pytest

from protos.frontend.v1 import frontend_pb2
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import Stack, free_port, stack

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
{% if not enable_thinking %}
</think>

{% endif %}
"""
"""Reasoning is closed unless enable_thinking opens it, as in the template of Qwen3."""
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days", "unit"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NUM_SEEDS = 2


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> Iterator[tuple[Stack, str]]:
    folder = tmp_path_factory.mktemp("tiny-tools") / "model"
    shutil.copytree(TINY_CHECKPOINT, folder)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    port = free_port()
    engine = {"model": folder, "max_num_seqs": 8, "grammar_timeout_s": 30}
    with stack(engine=engine, frontend={"http_port": port}) as running:
        yield running, f"http://127.0.0.1:{port}/v1"


@pytest.fixture
async def client(services):
    async with openai.AsyncOpenAI(base_url=services[1], api_key="none", timeout=120) as connected:
        yield connected


async def ask(client, seed, *, max_tokens=400, **changes):
    models = await client.models.list()
    return await client.chat.completions.create(
        model=models.data[0].id,
        messages=[{"role": "user", "content": f"What is the weather in town {seed}?"}],
        tools=TOOLS,
        seed=seed,
        max_tokens=max_tokens,
        **changes,
    )


async def streamed(client, seed, **changes):
    """Returns content, reasoning, names and arguments, and the finish reason of a stream."""
    content, reasoning, calls, finish = "", "", [], None
    async for chunk in await ask(client, seed, stream=True, **changes):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


def told(answer):
    [choice] = answer.choices
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return message.content or "", reasoning, calls, choice.finish_reason


@pytest.mark.parametrize(
    "demand",
    [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": NAMED},
        {"tool_choice": NAMED, "temperature": 0},
    ],
    ids=["required", "named", "greedy"],
)
async def test_demanded_calls_always_parse_and_are_the_same_streamed(client, demand):
    # One after the other: a seed repeats up to rounding in other batches.
    whole = told(await ask(client, 0, **demand))
    assert await streamed(client, 0, **demand) == whole
    content, reasoning, [(name, arguments)], finish = whole
    assert (content, reasoning, finish) == ("", "", "tool_calls")
    assert name in SCHEMAS
    assert name == "get_weather" or demand["tool_choice"] == "required"
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def test_several_demanded_calls_all_parse(client):
    async def check(seed):
        content, _, calls, finish = told(await ask(client, seed, tool_choice="required"))
        complete = calls if finish == "tool_calls" else calls[:-1]
        assert content == ""
        for name, arguments in complete:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])

    await asyncio.gather(*(check(seed) for seed in range(NUM_SEEDS)))


async def test_a_demanded_call_comes_after_opened_reasoning(client):
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    answer = told(await ask(client, 1, max_tokens=100, tool_choice=NAMED, **thinking))
    content, reasoning, calls, finish = answer
    assert content == ""
    assert reasoning
    assert "</think>" not in reasoning
    if finish == "tool_calls":  # the model was not taught to end its reasoning
        jsonschema.validate(json.loads(calls[0][1]), SCHEMAS["get_weather"])


THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize("budget", [0, 1, 12])
async def test_reasoning_ends_at_its_budget_and_an_answer_follows(client, budget):
    for seed in range(NUM_SEEDS):
        fields = {"tool_choice": "none", "extra_body": THINKING | {"max_reasoning_tokens": budget}}
        answer = await ask(client, seed, **fields)
        content, reasoning, calls, _ = whole = told(answer)
        details = answer.usage.completion_tokens_details
        assert details.reasoning_tokens == budget  # the untaught model ends none by itself
        assert bool(reasoning) == bool(budget)
        assert content
        assert "think" not in content + reasoning
        assert not calls
        assert await streamed(client, seed, **fields) == whole


async def test_a_demanded_call_follows_reasoning_that_was_cut_short(client):
    fields = {"tool_choice": NAMED, "extra_body": THINKING | {"max_reasoning_tokens": 9}}
    answer = await ask(client, 0, **fields)
    content, reasoning, [(name, arguments)], finish = whole = told(answer)
    assert (content, name, finish) == ("", "get_weather", "tool_calls")
    assert reasoning
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert answer.usage.completion_tokens_details.reasoning_tokens == 9
    assert await streamed(client, 0, **fields) == whole


async def test_a_plain_answer_beside_tools_is_content(client):
    whole = told(await ask(client, 0, max_tokens=100))
    assert await streamed(client, 0, max_tokens=100) == whole
    assert whole[2:] == ([], "stop") or whole[3] in ("length", "tool_calls")


async def test_a_demanded_call_through_the_client_of_anthropic(services):
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    url = services[1].removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=120) as client:
        wish = {
            "model": (await client.models.list()).data[0].id,
            "messages": [{"role": "user", "content": "What is the weather in town 1?"}],
            "max_tokens": 400,
            "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "extra_body": {"temperature": 0},
        }
        whole = await client.messages.create(**wish)
        async with client.messages.stream(**wish) as stream:
            streamed = await stream.get_final_message()
        [call] = whole.content
        jsonschema.validate(call.input, SCHEMAS[call.name])
        assert (streamed.content[0].name, streamed.content[0].input) == (call.name, call.input)
        assert streamed.stop_reason == whole.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        turns = [
            *wish["messages"],
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        counted = await client.messages.count_tokens(
            model=wish["model"], messages=turns, tools=tools
        )
        answer = await client.messages.create(
            **wish | {"messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 8}
        )
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert counted.input_tokens > answer.usage.input_tokens + answer.usage.cache_read_input_tokens


async def test_an_agents_fields_through_the_client_of_anthropic(services):
    tools = [
        {"name": name, "input_schema": schema, "defer_loading": True}
        for name, schema in SCHEMAS.items()
    ]
    sums = {"type": "thinking", "thinking": "Sums.", "signature": ""}
    texts = [{"type": "text", "text": "Hello."}]
    url = services[1].removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=120) as client:
        wish = {
            "model": (await client.models.list()).data[0].id,
            "messages": [
                {"role": "user", "content": "Hello."},
                {"role": "assistant", "content": [sums, *texts]},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": [sums, *texts]},
                {"role": "user", "content": "What is the weather in town 1?"},
            ],
            "max_tokens": 400,
            "tools": [*tools, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "betas": ["context-management-2025-06-27"],
            "extra_body": {"temperature": 0},
        }
        whole = await client.beta.messages.create(**wish)
        async with client.beta.messages.stream(**wish) as stream:
            streamed = await stream.get_final_message()
    thinking, call = whole.content
    assert (thinking.type, thinking.thinking) == ("thinking", "")
    jsonschema.validate(call.input, SCHEMAS[call.name])
    [edit] = whole.context_management.applied_edits
    assert edit.cleared_thinking_turns == 1
    own = {"id", "content", "usage"}
    assert streamed.model_dump(exclude=own) == whole.model_dump(exclude=own)


async def test_a_demanded_call_over_grpc(services):
    request = frontend_pb2.ChatRequest(
        options={"sampling": {"seed": 1, "max_tokens": 200}},
        messages=[{"role": "user", "content": "What is the weather?"}],
        tools=[
            {"name": name, "parameters": json.dumps(schema)} for name, schema in SCHEMAS.items()
        ],
        required_tool="get_weather",
    )
    async with grpc.aio.insecure_channel(services[0].frontend.address) as channel:
        chat = FrontendServiceStub(channel).Chat
        pieces = [piece async for each in chat(request) for piece in each.output.tool_calls]
    assert pieces[0].name == "get_weather"
    arguments = "".join(piece.arguments for piece in pieces)
    jsonschema.validate(json.loads(arguments), SCHEMAS["get_weather"])


async def test_a_schema_that_is_not_enforced_is_refused(client):
    models = await client.models.list()
    tool = {"name": "f", "parameters": {"type": "object", "if": {}, "then": {}}}
    with pytest.raises(openai.BadRequestError, match="tag 0: json_schema has 'if'"):
        await client.chat.completions.create(
            model=models.data[0].id,
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": tool}],
            tool_choice="required",
        )
