"""Several prompts in one completion, and facts about prompts alone."""

from collections import defaultdict

import pytest

from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until
from tests.unit.frontend.http.test_app import events_of, http_stack

COMPLETION = {"model": "fake", "max_tokens": 64}
TEXTS = ["hello", "one two three"]


def ids(text: str) -> list[int]:
    return reference_tokenizer().encode(text).ids


def repeating() -> FakeEngine:
    """Says each prompt again, so that each output shows its prompt."""
    return FakeEngine(script=lambda prompt: [*prompt, 1])


@pytest.mark.parametrize("prompts", [TEXTS, [ids(text) for text in TEXTS]], ids=["texts", "ids"])
async def test_each_prompt_gets_its_outputs_in_order(prompts):
    async with http_stack(repeating()) as (stack, client):
        body = (
            await client.post("/v1/completions", json=COMPLETION | {"prompt": prompts, "n": 2})
        ).json()
        alone = [
            (await client.post("/v1/completions", json=COMPLETION | {"prompt": each})).json()
            for each in prompts
        ]
    assert [(each["index"], each["text"]) for each in body["choices"]] == [
        (0, "hello"), (1, "hello"), (2, "one two three"), (3, "one two three")
    ]  # fmt: skip
    usages = [each["usage"] for each in alone]
    assert body["usage"]["prompt_tokens"] == sum(each["prompt_tokens"] for each in usages)
    assert body["usage"]["completion_tokens"] == 2 * sum(u["completion_tokens"] for u in usages)
    assert len({submit.request_id for submit in stack.engine.submits[:4]}) == 4


async def test_prompts_stream_at_the_same_time():
    engine = repeating()
    engine.hold_at = 2
    wish = COMPLETION | {"prompt": TEXTS, "stream": True, "echo": True}
    async with (
        http_stack(engine) as (_, client),
        client.stream("POST", "/v1/completions", json=wish) as response,
    ):
        lines = response.aiter_lines()
        begun = set()
        async for line in lines:
            begun |= {number for number in (0, 1) if f'"index":{number}' in line}
            if len(begun) == 2:
                break
        engine.hold_at = None
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_a_stream_of_prompts_has_the_text_of_the_whole_answer():
    wish = COMPLETION | {"prompt": TEXTS, "echo": True}
    async with http_stack(repeating()) as (_, client):
        whole = (await client.post("/v1/completions", json=wish)).json()
        async with client.stream(
            "POST", "/v1/completions", json=wish | {"stream": True}
        ) as response:
            chunks = await events_of(response)
    texts = defaultdict(str)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert dict(texts) == {each["index"]: each["text"] for each in whole["choices"]}
    assert texts[1] == "one two threeone two three"


async def test_a_negative_seed_is_one_of_its_own():
    async with http_stack() as (stack, client):
        for seed in (-(2**63), -2, 2**63 - 1):
            await client.post("/v1/completions", json=COMPLETION | {"prompt": "a", "seed": seed})
        seeds = [submit.sampling.seed for submit in stack.engine.submits]
    assert seeds == [2**63, 2**64 - 2, 2**63 - 1]


async def test_equal_seeds_make_a_prompt_the_same_alone_and_among_others():
    async with http_stack() as (stack, client):
        await client.post("/v1/completions", json=COMPLETION | {"prompt": TEXTS, "n": 2, "seed": 5})
        await client.post("/v1/completions", json=COMPLETION | {"prompt": "hello", "seed": -1})
        seeds = [submit.sampling.seed for submit in stack.engine.submits]
    assert seeds[:4] == [5, 6, 5, 6]
    assert seeds[4] not in (-1, 2**64 - 1)


@pytest.mark.parametrize("bad", ["x" * 2000, ""], ids=["long", "empty"])
async def test_one_wrong_prompt_refuses_all_before_any_work(bad):
    async with http_stack(FakeEngine(max_model_len=64)) as (stack, client):
        response = await client.post(
            "/v1/completions", json=COMPLETION | {"prompt": ["hello", bad]}
        )
    assert response.status_code == 400
    assert not stack.engine.submits


async def test_a_client_that_leaves_cancels_all_its_prompts():
    engine = FakeEngine(script=says("one two " * 100, eos=False), step_s=0.01)
    wish = COMPLETION | {"prompt": ["hello"] * 4, "stream": True, "max_tokens": 400}
    async with http_stack(engine) as (_, client):
        async with client.stream("POST", "/v1/completions", json=wish) as response:
            await anext(response.aiter_lines())
            # The first may speak before the engine has the last.
            await until(lambda: len(engine.live) == 4)
        await until(lambda: not engine.live)


async def test_usage_comes_with_each_chunk_where_it_is_asked_for():
    wish = COMPLETION | {
        "prompt": TEXTS,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with (
        http_stack(repeating()) as (_, client),
        client.stream("POST", "/v1/completions", json=wish) as response,
    ):
        chunks = await events_of(response)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        sum(len(ids(text)) for text in TEXTS)
    }
    assert chunks[-1]["usage"]["completion_tokens"] == counts[-2]


async def test_no_output_tokens_leave_the_prompt():
    wish = COMPLETION | {"prompt": TEXTS, "max_tokens": 0, "echo": True, "logprobs": 0}
    async with http_stack() as (_, client):
        body = (await client.post("/v1/completions", json=wish)).json()
        async with client.stream(
            "POST", "/v1/completions", json=wish | {"stream": True}
        ) as response:
            chunks = await events_of(response)
    assert [each["text"] for each in body["choices"]] == TEXTS
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    assert sorted(chunk["choices"][0]["text"] for chunk in chunks) == TEXTS


async def test_a_batch_is_read_in_the_process_for_large_bodies_too():
    async with (
        FakeEngine(max_model_len=4096) as engine,
        frontend_stack(engine, http_port=0) as stack,
        stack.http_client(timeout_s=60) as client,
    ):
        wish = COMPLETION | {"prompt": [[5] * 1000] * 5}
        fine = await client.post("/v1/completions", json=wish)
        refused = await client.post("/v1/completions", json=wish | {"n": 30})
    assert [each["index"] for each in fine.json()["choices"]] == [0, 1, 2, 3, 4]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
