"""The HTTP API of real services, through the official openai client."""

from collections.abc import AsyncIterator

import openai
import pytest

from tests.support.engine_client import engine_stub, get_stats
from tests.support.pace import stopped, until_aborted, until_live
from tests.support.steered_engine import stop_after

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture
async def client(served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as connected:
        yield connected


async def test_a_sum_is_answered_whole_and_in_a_stream_alike(client):
    wish = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 64}
    whole = await client.chat.completions.create(**wish)
    stream = await client.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage_chunk = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "7" in text
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert usage_chunk.choices == []
    assert usage_chunk.usage.completion_tokens == whole.usage.completion_tokens > 1


async def test_a_prompt_is_continued_whole_and_in_a_stream_alike(client):
    wish = {"model": MODEL, "prompt": "Once upon", "temperature": 0, "max_tokens": 8}
    whole = await client.completions.create(**wish)
    chunks = [chunk async for chunk in await client.completions.create(**wish, stream=True)]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) != ""
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8


async def test_a_begun_answer_is_continued_as_the_model_would_have(client):
    wish = {"model": MODEL, "temperature": 0, "max_tokens": 64}
    whole = await client.chat.completions.create(messages=MESSAGES, **wish)
    text = whole.choices[0].message.content
    begun = text[: text.index(" ")]
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    more = await client.chat.completions.create(
        messages=messages, extra_body={"continue_final_message": True}, **wish
    )
    assert begun + more.choices[0].message.content == text
    stop = text[len(begun) + 1 : -1]
    wish |= {"stop": stop, "extra_body": {"include_stop_str_in_output": True}}
    ended = await client.chat.completions.create(messages=MESSAGES, **wish)
    assert ended.choices[0].message.content == f"{begun} {stop}"
    stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **wish)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == f"{begun} {stop}"


async def test_log_probabilities_are_sent_in_both_forms(client):
    sampling = {"model": MODEL, "temperature": 0, "max_tokens": 3}
    chat = await client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **sampling
    )
    completion = await client.completions.create(prompt="Once upon", logprobs=2, **sampling)
    forced = await client.completions.create(
        prompt="Once upon", logprobs=1, logit_bias={"5": 100}, **sampling
    )
    for entry in chat.choices[0].logprobs.content:
        assert entry.token == entry.top_logprobs[0].token
        assert entry.top_logprobs[1].logprob <= entry.logprob <= 0
    told = completion.choices[0].logprobs
    assert "".join(told.tokens) == completion.choices[0].text
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2
    told = forced.choices[0].logprobs
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert top[token] == logprob < max(top.values())  # beside the most likely one
        assert len(top) == 2


async def test_errors_are_those_that_the_client_knows(client):
    chat = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        await chat(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as bad:
        await chat(model=MODEL, messages=MESSAGES, top_p=2)
    with pytest.raises(openai.BadRequestError) as long:
        await chat(model=MODEL, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(openai.BadRequestError) as embeddings:
        await client.embeddings.create(model=MODEL, input="x")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    assert bad.value.param == "top_p"
    assert "tokens" in long.value.message
    assert long.value.code == "context_length_exceeded"
    assert embeddings.value.code == "unsupported_endpoint"


async def test_a_client_that_goes_away_frees_its_blocks(served, client, stop_file):
    engine = served.services.engine
    async with engine_stub(engine.address) as stub:
        before = await get_stats(stub)
        stop_after(stop_file, 50)
        stream = await client.completions.create(
            model=MODEL,
            prompt="x",
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with stopped(engine):
            await anext(aiter(stream))
            await stream.close()
            await until_aborted(engine, before.finished["aborted"] + 1)
        await until_live(engine, 0)
        stats = await get_stats(stub)
    assert stats.finished["aborted"] == before.finished["aborted"] + 1
    assert stats.num_free_blocks == before.num_free_blocks


def test_no_text_is_logged(served):
    assert "3 + 4" not in served.services.frontend.log
    assert '"method": "HttpChat"' in served.services.frontend.log
