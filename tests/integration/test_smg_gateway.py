"""The smg gateway of PyPI in front of a real engine, driven by the openai client."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import jsonschema
import openai
import pytest

from protos.engine.v1.engine_pb2 import GetStatsRequest
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import engine_stub
from tests.support.pace import until_live
from tests.support.processes import Stack, free_port, stack
from tests.support.smg_gateway import missing_part, smg_gateway

pytestmark = pytest.mark.skipif(bool(missing_part()), reason=missing_part())

MODEL = "tiny"
ENDLESS = 100_000
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
STORY = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


@dataclass
class Served:
    services: Stack
    gateway_url: str
    frontend_url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoints") / MODEL
    shutil.copytree(TINY_CHECKPOINT, folder)
    port = free_port()
    config = json.loads((folder / "config.json").read_text())
    # Output that is as long as that does not end while a test waits.
    config["max_position_embeddings"] = ENDLESS + 1000
    (folder / "config.json").write_text(json.dumps(config))
    flags = {"vllm_grpc": True, "model": folder, "max_num_seqs": 16}
    with stack(engine=flags, frontend={"http_port": port}) as both:
        # The gateway would read the folder; on another host it gets the tokenizer from the engine.
        folder.rename(folder.with_name("elsewhere"))
        with smg_gateway(both.engine.address, MODEL) as url:
            yield Served(both, f"{url}/v1", f"http://127.0.0.1:{port}/v1")


@pytest.fixture
async def gateway(served):
    async with connected(served.gateway_url) as client:
        yield client


@pytest.fixture
async def frontend(served):
    async with connected(served.frontend_url) as client:
        yield client


def connected(url):
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


async def engine_stats(served):
    async with engine_stub(served.services.engine.address) as stub:
        return await stub.GetStats(GetStatsRequest())


def facts(choice):
    return choice.index, choice.finish_reason, choice.text


async def test_a_chat_gets_what_our_own_frontend_answers(gateway, frontend):
    wish = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    wish |= {"logprobs": True, "top_logprobs": 3}
    ours = await frontend.chat.completions.create(**wish)
    theirs = await gateway.chat.completions.create(**wish)
    assert theirs.choices[0].message.content == ours.choices[0].message.content != ""
    assert theirs.choices[0].finish_reason == ours.choices[0].finish_reason == "stop"
    assert theirs.usage.total_tokens == ours.usage.total_tokens
    own = {entry.token: entry for entry in ours.choices[0].logprobs.content}
    told = [entry for entry in theirs.choices[0].logprobs.content if entry.token in own]
    assert len(told) >= len(own)
    for entry in told:
        assert len(entry.top_logprobs) == 3
    assert told[0].logprob == pytest.approx(ours.choices[0].logprobs.content[0].logprob, abs=1e-4)


async def test_a_silent_chat_is_sampled_as_the_model_says(gateway, frontend):
    """The gateway applies the engine's defaults; this model's are greedy."""
    wish = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24}
    ours = await frontend.chat.completions.create(**wish, temperature=0)
    theirs = await gateway.chat.completions.create(**wish)
    assert theirs.choices[0].message.content == ours.choices[0].message.content


async def test_two_sampled_outputs_are_those_of_our_own_frontend(gateway, frontend):
    wish = {"model": MODEL, "prompt": "Once upon a", "max_tokens": 24, "n": 2}
    wish |= {"temperature": 1.0, "seed": 5}
    ours = await frontend.completions.create(**wish)
    theirs = await gateway.completions.create(**wish)
    assert list(map(facts, theirs.choices)) == list(map(facts, ours.choices))
    assert theirs.usage.completion_tokens == ours.usage.completion_tokens


async def test_the_streams_of_two_chats_with_log_probabilities_add_up_to_the_whole(gateway):
    wish = {"model": MODEL, "messages": STORY, "max_tokens": 16, "n": 2, "seed": 3}
    wish |= {"temperature": 1.5, "logprobs": True, "top_logprobs": 2}
    whole = await gateway.chat.completions.create(**wish)
    texts, tokens, reasons, usage = ["", ""], [[], []], [None, None], None
    stream = await gateway.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    for streamed in tokens:
        assert len(streamed) >= 1
        assert all(len(entry.top_logprobs) == 2 for entry in streamed)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_follows_its_json_schema(gateway, is_streamed):
    wish = {"model": MODEL, "messages": MESSAGES, "max_tokens": 150, "temperature": 0}
    answer = await gateway.chat.completions.create(
        **wish, response_format=SCHEMA_FORMAT, stream=is_streamed
    )
    if is_streamed:
        content = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    else:
        content = answer.choices[0].message.content
    jsonschema.validate(json.loads(content), SCHEMA)


async def test_a_stop_string_ends_the_request_at_the_engine(served, gateway, frontend):
    wish = {"model": MODEL, "prompt": "Once upon a", "max_tokens": 200, "temperature": 0}
    wish |= {"extra_body": {"ignore_eos": True}}
    first = await frontend.completions.create(**wish)
    stop = first.choices[0].text[20:25]
    before = await engine_stats(served)
    cut = await gateway.completions.create(**wish, stop=[stop])
    after = await engine_stats(served)
    assert cut.choices[0].text == first.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    assert after.output_tokens - before.output_tokens < 50


async def test_a_client_that_leaves_ends_its_request(served, gateway):
    engine = served.services.engine
    before = await engine_stats(served)
    stream = await gateway.completions.create(
        model=MODEL, prompt="Once", max_tokens=ENDLESS, n=2, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    await anext(aiter(stream))
    await stream.close()
    await until_live(engine, 0)
    stats = await engine_stats(served)
    assert stats.finished["aborted"] == before.finished["aborted"] + 2


async def test_what_the_engine_refuses_is_the_callers_mistake(gateway):
    with pytest.raises(openai.BadRequestError, match="the grammar is refused"):
        await gateway.completions.create(
            model=MODEL, prompt="Once", extra_body={"regex": "("}, max_tokens=4
        )
    with pytest.raises(openai.BadRequestError, match="n is 17; it must be 1 to 16"):
        await gateway.completions.create(model=MODEL, prompt="Once", n=17, max_tokens=4)
