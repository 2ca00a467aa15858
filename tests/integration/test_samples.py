"""Several outputs of one prompt from real services."""

import grpc
import openai
import pytest

from protos.engine.v1.engine_pb2 import GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.client.client import OctavoClient
from services.client.requests import Options, Sampling

PROMPT = "Once upon a time there was a small dog that " * 12


async def engine_stats(served_in_chunks):
    async with grpc.aio.insecure_channel(served_in_chunks.services.engine.address) as channel:
        return await EngineServiceStub(channel).GetStats(GetStatsRequest())


def sampled(seed):
    return Sampling(seed=seed, temperature=1.0, max_tokens=24, ignore_eos=True)


async def test_each_output_is_that_of_a_request_with_its_seed_and_the_prompt_is_computed_once(
    served_in_chunks,
):
    before = await engine_stats(served_in_chunks)
    async with OctavoClient(served_in_chunks.services.frontend.address) as client:
        together = await client.generate(
            PROMPT, Options(sampling=sampled(7), n=4, cache_salt="together")
        ).completions()
        after = await engine_stats(served_in_chunks)
        alone = [
            await client.generate(PROMPT, Options(sampling=sampled(7 + i))).completion()
            for i in range(4)
        ]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert len({each.text for each in together}) > 1
    usage = together[0].usage
    assert usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert usage.output_tokens == 4 * 24
    assert usage.cached_tokens == 0
    num_full = (usage.prompt_tokens - 1) // 16 * 16
    assert after.cached_tokens - before.cached_tokens == 3 * num_full


async def test_the_openai_client_gets_its_choices_whole_and_in_a_stream_alike(served_in_chunks):
    wish = {"model": "tiny", "seed": 3, "temperature": 1, "max_tokens": 12, "n": 3, "logprobs": 1}
    async with openai.AsyncOpenAI(
        base_url=served_in_chunks.url, api_key="none", max_retries=0
    ) as client:
        whole = await client.completions.create(prompt=PROMPT, **wish)
        texts, offsets = ["", "", ""], [[], [], []]
        stream = await client.completions.create(
            prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **wish
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                offsets[choice.index] += choice.logprobs.text_offset
        assert chunk.usage == whole.usage
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert [choice.text for choice in whole.choices] == texts
        assert [choice.logprobs.text_offset for choice in whole.choices] == offsets
        assert whole.usage.completion_tokens == sum(
            len(choice.logprobs.tokens) + (choice.finish_reason == "stop")
            for choice in whole.choices
        )
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], n=2, max_tokens=5
        )
        assert [choice.index for choice in chat.choices] == [0, 1]
        with pytest.raises(openai.BadRequestError, match="must be 1 to 32"):
            await client.completions.create(prompt="x", model="tiny", n=33)
