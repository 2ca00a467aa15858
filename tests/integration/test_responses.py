"""The Responses API of real services, through the official openai client."""

import re
from collections.abc import AsyncIterator

import openai
import pydantic
import pytest

from tests.support import codex
from tests.support.codex import SECOND_TURN

WISH = {"model": "tiny", "temperature": 0, "max_output_tokens": 64}


class Answer(pydantic.BaseModel):
    value: int


@pytest.fixture
async def client(served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as connected:
        yield connected


async def test_a_sum_is_answered_whole_and_in_a_stream_alike(client):
    whole = await client.responses.create(**WISH, input="What is 3 + 4?")
    async with client.responses.stream(**WISH, input="What is 3 + 4?") as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        streamed = await stream.get_final_response()
    assert "7" in whole.output_text
    assert whole.output_text == streamed.output_text == "".join(deltas)
    assert whole.status == streamed.status == "completed"
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 1


async def test_it_is_the_answer_of_chat(client):
    chat = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is 3 + 4?"}],
        temperature=0,
        max_tokens=64,
    )
    response = await client.responses.create(**WISH, input="What is 3 + 4?")
    assert response.output_text == chat.choices[0].message.content


async def test_a_conversation_goes_on_and_its_beginning_is_cached(client):
    first = await client.responses.create(**WISH, input="What is 3 + 4?")
    second = await client.responses.create(
        **WISH, previous_response_id=first.id, input="What is 5 + 6?"
    )
    stateless = await client.responses.create(
        **WISH,
        store=False,
        input=[
            {"role": "user", "content": "What is 3 + 4?"},
            *first.output,
            {"role": "user", "content": "What is 5 + 6?"},
        ],
    )
    assert second.output_text == stateless.output_text
    assert second.usage.input_tokens == stateless.usage.input_tokens > first.usage.input_tokens
    assert stateless.usage.input_tokens_details.cached_tokens > 0
    assert await client.responses.delete(first.id) is None
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(**WISH, previous_response_id=first.id, input="x")


async def test_a_schema_is_kept(client):
    parsed = await client.responses.parse(
        model="tiny", input="What is 3 + 4?", text_format=Answer, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed.value, int)


async def test_a_conversation_that_is_too_long_is_refused_or_truncated(client):
    items = [{"role": "user", "content": "word " * 400}] * 20
    with pytest.raises(openai.BadRequestError, match="tokens"):
        await client.responses.create(**WISH, input=items)
    truncated = await client.responses.create(**WISH, input=items, truncation="auto")
    assert truncated.output


async def test_a_turn_of_codex_is_answered_and_its_calls_have_their_names(client):
    wish = codex.body(SECOND_TURN, model="tiny", stream=True)
    own = {"client_metadata": wish.pop("client_metadata")}
    stream = await client.responses.create(**wish, max_output_tokens=16, extra_body=own)
    last = [event async for event in stream][-1]
    assert last.response.output
    called = await client.responses.create(
        model="tiny",
        input="Say hello.",
        tools=[codex.SHELL, codex.AGENTS, codex.SEARCH],
        tool_choice={"type": "function", "name": "close_agent"},
        text={"format": {"type": "json_schema", "name": "close", "schema": {"type": "object"}}},
        max_output_tokens=200,
    )
    [call] = [item for item in called.output if item.type == "function_call"]
    assert (call.namespace, call.name) == ("multi_agent_v1", "close_agent")


async def test_a_demanded_custom_tool_follows_its_lark_grammar(client):
    definition = 'start: "*** " word ("+" word)? "!"\nword: /[a-z]{1,8}/'
    response = await client.responses.create(
        **WISH,
        input="Change a file.",
        tools=[
            codex.SHELL,
            codex.PATCH | {"format": codex.PATCH["format"] | {"definition": definition}},
        ],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    [call] = response.output
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
    assert re.fullmatch(r"\*\*\* [a-z]{1,8}(\+[a-z]{1,8})?!", call.input)


async def test_input_items_and_their_tokens_are_those_of_the_client(client):
    first = await client.responses.create(**WISH, input="What is 3 + 4?")
    second = await client.responses.create(
        **WISH, previous_response_id=first.id, input="What is 5 + 6?"
    )
    pages = client.responses.input_items.list(second.id, limit=1, order="asc")
    items = [item async for item in pages]
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[2].content[0].text == "What is 5 + 6?"
    counted = await client.responses.input_tokens.count(
        model="tiny", previous_response_id=first.id, input="What is 5 + 6?"
    )
    assert counted.input_tokens == second.usage.input_tokens
