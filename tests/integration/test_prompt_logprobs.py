"""Log-probabilities of prompts and completions with echo, from real services."""

import openai
import pytest

from services.client.client import OctavoClient
from services.client.errors import InvalidRequestError
from services.client.requests import Options, Sampling

PROMPT = "Once upon a time there was a small dog. " * 3


@pytest.fixture
async def client(served_in_chunks):
    async with OctavoClient(served_in_chunks.services.frontend.address) as connected:
        yield connected


def options(prompt_logprobs=None, *, max_tokens=6, n=None, logprobs=None):
    sampling = Sampling(
        temperature=0, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    return Options(sampling=sampling, n=n)


async def test_what_was_generated_has_the_same_log_probabilities_as_a_prompt(client):
    """Decoding and prefill must agree on the log-probabilities of the output, sent back as a
    prompt."""
    prompt = [token.id for token in await client.tokenize(PROMPT)]
    first = await client.generate(prompt, options(logprobs=2, max_tokens=20)).completion()
    again = await client.generate(
        prompt + first.token_ids, options(prompt_logprobs=2, max_tokens=1)
    ).completion()
    told = again.prompt_logprobs
    assert [entry.chosen.token_id for entry in told] == (prompt + first.token_ids)[1:]
    for entry, expected in zip(told[len(prompt) - 1 :], first.logprobs, strict=True):
        assert entry.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-3)
        assert [top.token_id for top in entry.top] == [top.token_id for top in expected.top]


async def test_a_cached_prompt_has_log_probabilities_and_the_next_one_is_cached_again(client):
    await client.generate(PROMPT, options()).completion()
    asked = await client.generate(PROMPT, options(prompt_logprobs=0)).completion()
    assert asked.usage.cached_tokens == 0
    assert len(asked.prompt_logprobs) == asked.usage.prompt_tokens - 1
    after = await client.generate(PROMPT, options()).completion()
    assert after.usage.cached_tokens > 0
    assert after.token_ids == asked.token_ids
    assert not after.prompt_logprobs


async def test_the_first_of_several_outputs_has_them(client):
    answers = await client.generate(PROMPT, options(prompt_logprobs=0, n=3)).completions()
    prompt_tokens = answers[0].usage.prompt_tokens
    assert [len(answer.prompt_logprobs) for answer in answers] == [prompt_tokens - 1, 0, 0]


async def test_a_long_prompt_is_reported_in_one_piece_and_a_wrong_number_is_refused(client):
    with pytest.raises(InvalidRequestError, match="must be in"):
        await client.generate("x", options(prompt_logprobs=21)).completion()
    wish = options(prompt_logprobs=20, max_tokens=1)
    answer = await client.generate([5] * 1900, wish).completion()
    assert len(answer.prompt_logprobs) == 1899


async def test_the_openai_client_receives_its_prompts_log_probabilities_as_from_vllm(
    served_in_chunks,
):
    async with openai.AsyncOpenAI(
        base_url=served_in_chunks.url, api_key="none", max_retries=0
    ) as client:
        wish = {"model": "tiny", "temperature": 0, "max_tokens": 4}
        completion = await client.completions.create(
            prompt=PROMPT, n=2, extra_body={"prompt_logprobs": 2}, **wish
        )
        echoed = await client.completions.create(prompt=PROMPT, echo=True, logprobs=2, **wish)
        for choice in completion.choices:
            told = choice.prompt_logprobs
            assert told[0] is None
            assert len(told) == completion.usage.prompt_tokens
            for entries, logprob, top in zip(
                told[1:],
                echoed.choices[0].logprobs.token_logprobs[1:],
                echoed.choices[0].logprobs.top_logprobs[1:],
                strict=False,
            ):
                chosen, *_ = entries.values()  # the prompt's own token comes first
                assert chosen["logprob"] == pytest.approx(logprob, abs=1e-4)
                ranked = {each["decoded_token"]: each["rank"] for each in entries.values()}
                assert [ranked[text] for text in top][:2] == [1, 2]  # then its own, if not there
                assert chosen["rank"] in (1, 2, None)
        chat = await client.chat.completions.create(
            messages=[{"role": "user", "content": "What is 3 + 4?"}],
            extra_body={"prompt_logprobs": 0},
            **wish,
        )
        assert [len(entries) for entries in chat.prompt_logprobs[1:]] == [1] * (
            chat.usage.prompt_tokens - 1
        )
        plain = await client.completions.create(prompt=PROMPT, **wish)
        assert "prompt_logprobs" not in plain.choices[0].model_dump()


async def test_a_completion_with_echo_begins_with_its_prompt(served_in_chunks):
    async with openai.AsyncOpenAI(
        base_url=served_in_chunks.url, api_key="none", max_retries=0
    ) as client:
        wish = {"model": "tiny", "temperature": 0, "max_tokens": 4}
        plain = await client.completions.create(prompt=PROMPT, logprobs=2, **wish)
        echoed = await client.completions.create(prompt=PROMPT, echo=True, logprobs=2, **wish)
        [choice] = echoed.choices
        assert choice.text == PROMPT + plain.choices[0].text
        told = choice.logprobs
        assert "".join(told.tokens) == choice.text
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        assert all(value <= 0 for value in told.token_logprobs[1:])
        assert told.text_offset[-1] + len(told.tokens[-1]) == len(choice.text)
        assert len(told.tokens) == echoed.usage.prompt_tokens + 4
        assert told.tokens[-4:] == plain.choices[0].logprobs.tokens
        stream = await client.completions.create(
            prompt=PROMPT, echo=True, logprobs=2, stream=True, **wish
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
        tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
        assert tokens == told.tokens
        both = await client.completions.create(prompt=PROMPT, echo=True, n=2, **wish)
        assert [each.text for each in both.choices] == [choice.text] * 2
        ids = await client.completions.create(prompt=[60, 61, 62], echo=True, **wish)
        bare = await client.completions.create(prompt=[60, 61, 62], **wish)
        assert ids.choices[0].text.endswith(bare.choices[0].text)
        assert len(ids.choices[0].text) > len(bare.choices[0].text)
