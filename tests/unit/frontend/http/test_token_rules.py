"""Allowed tokens, and words that the output may not have, as the engine gets them."""

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import EOS_TOKEN_ID, FakeEngine
from tests.unit.frontend.http.test_app import CHAT, COMPLETION, http_stack

PATHS = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"model": "fake", "input": "1?"}),
]


def ids(text):
    return reference_tokenizer().encode(text).ids


def forbidden(submit):
    return sorted(list(each.token_ids) for each in submit.sampling.forbidden_sequences)


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_they_reach_the_engine(path, body):
    wish = {"allowed_token_ids": [7, 5, 7], "bad_words": ["wor", " wor", "!"], "seed": 3}
    async with http_stack(running := FakeEngine()) as (_, client):
        answer = await client.post(path, json=body | wish)
    assert answer.status_code == 200, answer.text
    [submit] = running.submits
    assert submit.sampling.allowed_token_ids == [7, 5, 7]
    assert forbidden(submit) == sorted(map(ids, ("wor", " wor", "!", " !")))


async def test_every_sample_and_prompt_has_them():
    body = COMPLETION | {"prompt": ["a", "b"], "n": 2, "bad_words": ["!"]}
    async with http_stack(running := FakeEngine()) as (_, client):
        await client.post("/v1/completions", json=body)
    assert [forbidden(each) for each in running.submits] == [sorted([ids("!"), ids(" !")])] * 4


async def test_a_word_may_be_a_special_token_or_white_space():
    body = COMPLETION | {"bad_words": ["<|im_end|>", "\n\n"]}
    async with http_stack(running := FakeEngine()) as (_, client):
        await client.post("/v1/completions", json=body)
    sequences = forbidden(running.submits[0])
    assert [EOS_TOKEN_ID] in sequences
    assert ids("\n\n") in sequences


async def test_a_word_that_the_model_cannot_write_needs_no_rule():
    body = COMPLETION | {"prompt": [5], "bad_words": ["zz", "z"]}
    async with http_stack(running := FakeEngine(vocab_size=10)) as (_, client):
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert forbidden(running.submits[0]) == []


WRONG = [
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", ["5"]),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", [2**32]),
    ("allowed_token_ids", [5] * 65_537),
    ("bad_words", ["a", ""]),
    ("bad_words", "a"),
    ("bad_words", [5]),
    ("bad_words", ["a"] * 257),
    ("bad_words", ["a" * 257]),
    ("bad_words", [f"{i:03}" + "ab" * 100 for i in range(256)]),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_another_value_is_refused_by_name(path, body):
    async with http_stack(running := FakeEngine()) as (_, client):
        for name, value in WRONG:
            answer = await client.post(path, json=body | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), value
    assert not running.submits


async def test_they_hold_over_grpc():
    sampling = {"allowed_token_ids": [5], "forbidden_sequences": [{"token_ids": [3, 4]}]}
    options = {"bad_words": ["!"], "sampling": sampling}
    async with http_stack(running := FakeEngine()) as (stack, _):
        request = frontend_pb2.GenerateRequest(text="x", options=options)
        assert [each async for each in stack.stub.Generate(request)]
        for path, value, problem in (
            ("bad_words", ["a"] * 257, "bad_words has 257 texts; the limit is 256"),
            ("bad_words", [""], "a text of bad_words has 0 bytes"),
            ("sampling", {"allowed_token_ids": [5] * 65_537}, "allowed_token_ids has 65537"),
            ("sampling", {"forbidden_sequences": [{"token_ids": [5] * 2049}]}, "has 2049 tokens"),
        ):
            wrong = frontend_pb2.GenerateRequest(text="x", options={path: value})
            with pytest.raises(grpc.aio.AioRpcError, match=problem):
                await anext(aiter(stack.stub.Generate(wrong)))
    [submit] = running.submits
    assert submit.sampling.allowed_token_ids == [5]
    assert forbidden(submit) == sorted([[3, 4], ids("!"), ids(" !")])
