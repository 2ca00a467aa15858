"""A prompt that keeps its last tokens alone, because the caller says so."""

import grpc
import numpy as np
import pytest

from protos.frontend.v1 import frontend_pb2
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import FakeEngine
from tests.unit.frontend.http.test_app import CHAT, COMPLETION, http_stack

MAX_MODEL_LEN = 64
LONG = "one two three four " * 30
IDS = reference_tokenizer().encode(LONG).ids
CHAT_PATH, PATH = "/v1/chat/completions", "/v1/completions"


def engine():
    return FakeEngine(max_model_len=MAX_MODEL_LEN)


def prompts_of(running):
    return [np.frombuffer(each.prompt_token_ids, "<u4").tolist() for each in running.submits]


@pytest.mark.parametrize(
    ("changes", "num_kept"),
    [
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 1}, 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, MAX_MODEL_LEN - 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, MAX_MODEL_LEN - 10),
        ({"truncate_prompt_tokens": 60, "max_tokens": 10}, MAX_MODEL_LEN - 10),
        ({"truncate_prompt_tokens": 2**32 - 1, "max_tokens": 1000}, MAX_MODEL_LEN // 2),
    ],
)
@pytest.mark.parametrize("prompt", [LONG, IDS, [LONG, LONG], [IDS, IDS]])
async def test_a_prompt_keeps_its_last_tokens(prompt, changes, num_kept):
    body = {"model": "fake", "prompt": prompt} | changes
    async with http_stack(running := engine()) as (_, client):
        answer = (await client.post(PATH, json=body)).json()
        refused = await client.post(PATH, json=body | {"truncate_prompt_tokens": None})
    assert {tuple(each) for each in prompts_of(running)} == {tuple(IDS[-num_kept:])}
    assert answer["usage"]["prompt_tokens"] == num_kept * len(answer["choices"])
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_short_prompt_stays_as_it_is():
    async with http_stack(running := engine()) as (_, client):
        for kept in (-1, 30, None):
            await client.post(PATH, json=COMPLETION | {"truncate_prompt_tokens": kept})
    first, *others = prompts_of(running)
    assert others == [first, first]


async def test_a_conversation_keeps_the_end_of_its_prompt():
    wish = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 8}
    async with http_stack(running := engine()) as (_, client):
        whole = (await client.post("/tokenize", json={"messages": wish["messages"]})).json()
        answer = await client.post(CHAT_PATH, json=CHAT | wish | {"truncate_prompt_tokens": -1})
    assert answer.status_code == 200, answer.text
    assert prompts_of(running) == [whole["tokens"][-(MAX_MODEL_LEN - 8) :]]


@pytest.mark.parametrize("prompt", [LONG, IDS])
async def test_an_echo_repeats_what_was_kept(prompt):
    wish = {"model": "fake", "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
    async with http_stack(engine()) as (_, client):
        answer = await client.post(PATH, json=wish | {"truncate_prompt_tokens": 9})
    [choice] = answer.json()["choices"]
    assert choice["text"] == reference_tokenizer().decode(IDS[-9:])
    assert choice["logprobs"]["text_offset"][0] == 0


async def test_many_token_ids_are_cut_too():
    ids = IDS * 20  # the process for large bodies reads them
    body = {"model": "fake", "prompt": ids, "truncate_prompt_tokens": 7}
    async with http_stack(running := engine()) as (_, client):
        answer = await client.post(PATH, json=body)
        refused = await client.post(PATH, json=body | {"truncate_prompt_tokens": None})
    assert answer.status_code == 200, answer.text
    assert prompts_of(running) == [ids[-7:]]
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", [0, -2, 1.5, "5", True, 2**32, [5]])
@pytest.mark.parametrize(("path", "body"), [(PATH, COMPLETION), (CHAT_PATH, CHAT)])
async def test_another_value_is_refused_by_name(path, body, value):
    async with http_stack(running := engine()) as (_, client):
        answer = await client.post(path, json=body | {"truncate_prompt_tokens": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"
    assert not running.submits


@pytest.mark.parametrize("prompt", [{"text": LONG}, {"tokens": {"ids": IDS}}])
async def test_prompts_over_grpc_are_cut(prompt):
    async with http_stack(running := engine()) as (stack, _):
        for kept in (5, 1000):
            options = {"truncate_prompt_tokens": kept, "sampling": {"max_tokens": 4}}
            request = frontend_pb2.GenerateRequest(**prompt, options=options)
            assert [each async for each in stack.stub.Generate(request)]
        none = frontend_pb2.GenerateRequest(**prompt, options={"truncate_prompt_tokens": 0})
        with pytest.raises(grpc.aio.AioRpcError, match="truncate_prompt_tokens is 0"):
            await anext(aiter(stack.stub.Generate(none)))
    assert prompts_of(running) == [IDS[-5:], IDS[-(MAX_MODEL_LEN - 4) :]]
