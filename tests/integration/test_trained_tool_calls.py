"""Tool calls of the embedded model, which was trained to make them, through real services."""

import asyncio
import importlib
import json
import random
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import jsonschema
import openai
import pytest

from services.client.client import OctavoClient
from services.client.requests import Message, Options, Reply, Sampling, Tool
from tests.support.processes import Stack, free_port, stack

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUM_PROMPTS = 24
NUM_SAMPLED = 6
"""Prompts with sampled answers: up to 400 random tokens, which only the grammar makes valid."""
AT_ONCE = 8


@pytest.fixture(scope="module")
def corpus() -> Iterator[tuple]:
    """The scripts that wrote the model's corpus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("tiny_corpus"), importlib.import_module("tiny_tools")


@pytest.fixture(scope="module")
def called(corpus):
    """Requests, each with the name and arguments of the right call; training had other draws."""
    return corpus[1].call_prompts(1, NUM_PROMPTS)


@pytest.fixture(scope="module")
def tools(corpus):
    return corpus[1].usual_tools()


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[Stack, str]]:
    port = free_port()
    engine = {"max_num_seqs": AT_ONCE, "grammar_timeout_s": 30}
    with stack(engine=engine, frontend={"http_port": port}) as running:
        yield running, f"http://127.0.0.1:{port}/v1"


@asynccontextmanager
async def asking(url, tools):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=120) as client:
        [model] = (await client.models.list()).data
        room = asyncio.Semaphore(AT_ONCE)

        async def ask(messages, **changes):
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            fields = {"temperature": 0, "max_tokens": 200, "tools": tools, **changes}
            async with room:
                answer = await client.chat.completions.create(
                    model=model.id, messages=messages, **fields
                )
                return [chunk async for chunk in answer] if changes.get("stream") else answer

        yield ask


@pytest.fixture
async def ask(services, tools):
    async with asking(services[1], tools) as ask:
        yield ask


@pytest.fixture(scope="module")
def answers(services, tools, called):
    """The whole answer to each request."""

    async def ask_all():
        async with asking(services[1], tools) as ask:
            return await asyncio.gather(*(ask(asked) for asked, _, _ in called))

    return asyncio.run(ask_all())


def calls_of(answer):
    [choice] = answer.choices
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or ()
    ]


def joined(chunks):
    """Returns content, and name and arguments of each call, of a stream."""
    content, calls = "", []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            if piece.id:
                assert piece.index == len(calls)
                assert piece.function.name
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    return content, calls


def test_every_call_has_the_right_tool_and_arguments(answers, called):
    wrong = [
        (asked, answer.choices[0].message)
        for answer, (asked, name, arguments) in zip(answers, called, strict=True)
        if calls_of(answer) != [(name, arguments)]
        or answer.choices[0].finish_reason != "tool_calls"
        or answer.choices[0].message.content
    ]
    assert wrong == []


async def test_a_stream_is_the_whole_answer(ask, called, answers):
    async def check(asked, answer):
        whole = answer.choices[0].message
        content, calls = joined(await ask(asked, stream=True))
        expected = [[call.function.name, call.function.arguments] for call in whole.tool_calls]
        assert (content, calls) == (whole.content or "", expected)

    asked_answered = zip(called, answers, strict=True)
    await asyncio.gather(*(check(asked, answer) for (asked, _, _), answer in asked_answered))


@pytest.mark.parametrize("kind", ["required", "named", "strict"])
async def test_demanded_and_strict_calls_are_valid_whatever_is_sampled(ask, called, tools, kind):
    rng = random.Random(5)
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in tools]

    async def check(seed, asked):
        name = rng.choice(list(schemas))
        rules = {
            "required": {"tool_choice": "required"},
            "named": {"tool_choice": {"type": "function", "function": {"name": name}}},
            "strict": {"tools": strict},
        }[kind]
        answer = await ask(asked, temperature=1.5, seed=seed, max_tokens=400, **rules)
        [choice] = answer.choices
        calls = list(choice.message.tool_calls or ())
        if choice.finish_reason == "length":
            calls = calls[:-1]  # the tokens ended inside it
        assert calls or kind == "strict" or choice.finish_reason == "length"
        assert kind == "strict" or not choice.message.content
        for call in calls:
            assert kind != "named" or call.function.name == name
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])

    prompts = [asked for asked, _, _ in called[:NUM_SAMPLED]]
    prompts += ["Tell me a story about Mia.", "Hello!"]
    await asyncio.gather(*(check(seed, asked) for seed, asked in enumerate(prompts)))


async def test_results_of_calls_become_an_answer(ask):
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    message = (await ask([asked])).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "rainy"}'}
    answer = await ask([asked, message.model_dump(exclude_none=True), result])
    assert answer.choices[0].message.content == "The weather in Paris is rainy."
    assert answer.choices[0].finish_reason == "stop"


async def test_a_request_without_need_of_a_tool_is_answered(ask):
    for choice in ({}, {"tool_choice": "none"}):
        answer = await ask("Spell the word apple.", **choice)
        assert answer.choices[0].message.content == "a-p-p-l-e"
        assert not answer.choices[0].message.tool_calls
    answer = await ask("What is the weather in Paris?", tool_choice="none")
    assert not answer.choices[0].message.tool_calls


async def test_the_client_library_calls_and_answers(services, tools):
    described = [each["function"] for each in tools]
    known = [
        Tool(
            name=each["name"],
            description=each["description"],
            parameters=json.dumps(each["parameters"]),
            strict=True,
        )
        for each in described
    ]
    asked = Message(role="user", content="What is 123 + 456?")
    options = Options(sampling=Sampling(temperature=0, max_tokens=200))
    async with OctavoClient(services[0].frontend.address) as client:
        reply = Reply(tool_choice="add")
        first = await client.chat([asked], options, tools=known, reply=reply).completion()
        [call] = first.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 123, "b": 456})
        called = Message(role="assistant", tool_calls=[call])
        result = Message(role="tool", content="579", tool_call_id=call.id)
        last = await client.chat([asked, called, result], options, tools=known).completion()
        assert last.text == "123 + 456 = 579."
