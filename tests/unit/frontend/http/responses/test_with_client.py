"""The Responses API through the official openai client."""

import json
from contextlib import asynccontextmanager

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import says
from tests.support.responses import REPLY, TOOLS, prompt_of, running

KINDS = ["reasoning", "message", "function_call", "function_call"]


class Sum(pydantic.BaseModel):
    x: int


@asynccontextmanager
async def connected(reply="hello world", **config):
    async with (
        running(reply, **config) as (engine, stack, _),
        openai.AsyncOpenAI(
            base_url=f"{stack.http_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        yield engine, client


def results_of(response):
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in response.output
        if item.type == "function_call"
    ]


async def test_a_reply_has_its_items_whole_and_streamed():
    async with connected(REPLY) as (_, client):
        whole = await client.responses.create(model="fake", input="1?", tools=TOOLS)
        async with client.responses.stream(model="fake", input="1?", tools=TOOLS) as stream:
            types = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        Response.model_validate(response.to_dict())
        assert [item.type for item in response.output] == KINDS
        assert response.output_text == "I add."
        assert response.output[0].content[0].text == "Sums."
        calls = response.output[2:]
        assert [json.loads(call.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
        assert len({call.call_id for call in calls}) == 2
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert types[0] == "response.created"
    assert types[-1] == "response.completed"
    assert "response.reasoning_text.delta" in types


async def test_a_conversation_goes_on_from_the_store_as_from_its_items():
    async with connected(REPLY) as (engine, client):
        first = await client.responses.create(
            model="fake", input="1?", tools=TOOLS, instructions="Be kind."
        )
        assert prompt_of(engine).count("Be kind.") == 1
        results = results_of(first)
        second = await client.responses.create(
            model="fake", previous_response_id=first.id, input=results, tools=TOOLS
        )
        stored = prompt_of(engine)
        await client.responses.create(
            model="fake",
            input=[{"role": "user", "content": "1?"}, *first.output, *results],
            tools=TOOLS,
            store=False,
        )
        assert prompt_of(engine) == stored
        assert "<think>Sums.</think>I add.<tool_call>add" in stored
        assert "Be kind." not in stored  # instructions are each request's own
        assert second.previous_response_id == first.id
        third = await client.responses.create(
            model="fake", previous_response_id=second.id, input=results_of(second), tools=TOOLS
        )
        assert prompt_of(engine).startswith(stored)
        branch = await client.responses.create(
            model="fake", previous_response_id=second.id, input=results_of(second), tools=TOOLS
        )
        assert prompt_of(engine, -1) == prompt_of(engine, -2)
        assert branch.id != third.id


async def test_a_stream_can_be_continued_as_soon_as_it_has_ended():
    async with connected(REPLY) as (engine, client):
        async with client.responses.stream(model="fake", input="1?", tools=TOOLS) as stream:
            async for event in stream:
                if event.type == "response.completed":
                    break
        await client.responses.create(
            model="fake",
            previous_response_id=event.response.id,
            input=results_of(event.response),
            tools=TOOLS,
        )
        assert "Sums." in prompt_of(engine)


async def test_a_schema_is_the_form_of_the_answer():
    async with connected('{"x": 3}') as (engine, client):
        parsed = await client.responses.parse(model="fake", input="?", text_format=Sum)
        assert parsed.output_parsed == Sum(x=3)
        told = json.loads(engine.submits[-1].sampling.structured_output.json_schema)
        assert told["required"] == ["x"]
        assert parsed.text.format.schema_ == told
        async with client.responses.stream(model="fake", input="?", text_format=Sum) as stream:
            assert (await stream.get_final_response()).output_parsed == Sum(x=3)
        await client.responses.create(
            model="fake", input="?", text={"format": {"type": "json_object"}}
        )
        assert engine.submits[-1].sampling.structured_output.json_object
        # A parsed answer can be sent back.
        await client.responses.create(
            model="fake", input=[*parsed.output, {"role": "user", "content": "more"}]
        )


async def test_a_stored_response_is_shown_until_it_is_deleted():
    async with connected() as (_, client):
        made = await client.responses.create(model="fake", input="1?", metadata={"a": "b"})
        found = await client.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict()
        await client.responses.delete(made.id)
        for again in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="there is no response") as caught:
                await again(made.id)
            assert caught.value.code == "response_not_found"


async def test_log_probabilities_are_those_of_the_text():
    async with connected("<think>\nSums.\n</think>\n\nhello world") as (_, client):
        wish = {"model": "fake", "input": "1?", "include": ["message.output_text.logprobs"]}
        whole = await client.responses.create(**wish)
        async with client.responses.stream(**wish) as stream:
            deltas = [e async for e in stream if e.type == "response.output_text.delta"]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        [part] = response.output[-1].content
        assert "".join(each.token for each in part.logprobs).endswith("hello world")
        assert "Sums" not in "".join(each.token for each in part.logprobs)
    assert [each.token for delta in deltas for each in delta.logprobs] == [
        each.token for each in part.logprobs
    ]


async def test_a_limit_of_tokens_leaves_a_response_incomplete():
    limit = len(reference_tokenizer().encode(REPLY.partition(" 1}")[0]).ids)
    async with connected(REPLY) as (engine, client):
        cut = await client.responses.create(
            model="fake", input="1?", tools=TOOLS, max_output_tokens=limit
        )
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        *before, last = cut.output
        assert (last.type, last.status) == ("function_call", "incomplete")
        assert {item.status for item in before} == {"completed"}
        async with client.responses.stream(
            model="fake", input="1?", tools=TOOLS, max_output_tokens=limit
        ) as stream:
            *_, end = [event async for event in stream]
        assert end.type == "response.incomplete"
        # Half a call is part of the conversation, and seen to be half.
        await client.responses.create(model="fake", previous_response_id=cut.id, input="go on")
        assert r'I add.<tool_call>add{"INVALID_JSON": "{\"a\":"}</tool_call>' in prompt_of(engine)


async def test_an_empty_reply_is_an_empty_message():
    async with connected("") as (_, client):
        response = await client.responses.create(model="fake", input="1?")
    [item] = response.output
    assert (item.type, response.output_text, response.status) == ("message", "", "completed")


async def test_a_tool_choice_limits_or_demands_calls():
    async with connected(REPLY) as (engine, client):
        tools = [*TOOLS, {**TOOLS[0], "name": "sub"}]
        await client.responses.create(
            model="fake",
            input="1?",
            tools=tools,
            tool_choice={
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "sub"}],
            },
        )
        assert '"sub"' in prompt_of(engine)
        assert '"add"' not in prompt_of(engine)
        engine.script = says("hello")
        await client.responses.create(model="fake", input="1?", tools=tools, tool_choice="none")
        assert '"sub"' not in prompt_of(engine)
        for choice in ("required", {"type": "function", "name": "sub"}):
            await client.responses.create(model="fake", input="1?", tools=tools, tool_choice=choice)
            assert engine.submits[-1].sampling.structured_output.HasField("tagged")
