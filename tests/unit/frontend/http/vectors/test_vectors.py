"""Vectors, rankings and scores over HTTP and gRPC, in front of fake engines."""

import asyncio
import base64
import contextlib

import grpc
import numpy as np
import pytest

from protos.common.v1.failure_pb2 import Failure
from protos.engine.v1.engine_pb2 import PairText, Pooling, PoolingTask
from protos.frontend.v1 import frontend_pb2
from services.frontend.pipeline import vectors
from services.frontend.pipeline.input_encoder import cut
from services.frontend.pipeline.vectors import resized
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until

EMBEDDER = Pooling(
    task=PoolingTask.POOLING_TASK_EMBED,
    size=4,
    max_input_tokens=40,
    prompts={"query": "find: ", "document": ""},
    default_prompt_name="query",
)
SCORER = Pooling(
    task=PoolingTask.POOLING_TASK_SCORE,
    size=1,
    max_input_tokens=60,
    pair=PairText(prefix="<|im_start|>", text="{query}|{document}", suffix="<|im_end|>"),
)


@contextlib.asynccontextmanager
async def running(pooling=EMBEDDER, **config):
    async with (
        FakeEngine(pooling=pooling) as engine,
        frontend_stack(engine, http_port=0, **config) as stack,
        stack.http_client() as client,
    ):
        yield engine, stack, client


def ids(text):
    return reference_tokenizer().encode(text).ids


def vector(token_ids):
    return [sum(token_ids), len(token_ids), 0, 0]


def prompts_of(engine):
    return [np.frombuffer(each.prompt_token_ids, "<u4").tolist() for each in engine.submits]


async def embed(client, **body):
    return await client.post("/v1/embeddings", json={"model": "fake", **body})


async def test_every_form_of_input_is_served_in_its_order():
    async with running() as (engine, _, client):
        text = await embed(client, input="hello")
        texts = await embed(client, input=["hello", "world"], prompt_name="document")
        tokens = await embed(client, input=[3, 4, 5])
        lists = await embed(client, input=[[3, 4], [9]])
    expected = [
        [vector(ids("find: hello"))],
        [vector(ids("hello")), vector(ids("world"))],
        [vector([3, 4, 5])],
        [vector([3, 4]), vector([9])],
    ]
    for answer, wanted in zip((text, texts, tokens, lists), expected, strict=True):
        body = answer.json()
        assert body["object"] == "list"
        assert [each["index"] for each in body["data"]] == list(range(len(wanted)))
        assert [each["embedding"] for each in body["data"]] == wanted
        num_tokens = sum(int(each[1]) for each in wanted)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert all(submit.pool and not submit.HasField("sampling") for submit in engine.submits)


async def test_base64_has_the_same_numbers_and_dimensions_cut_them():
    async with running() as (_, _, client):
        encoded = await embed(client, input=[3, 4, 5], encoding_format="base64", dimensions=2)
    [data] = encoded.json()["data"]
    assert np.frombuffer(base64.b64decode(data["embedding"]), "<f4").tolist() == [12, 3]


def test_shorter_vectors_have_length_one_where_the_whole_ones_have():
    matrix = np.array([[3, 4, 12]], np.float32)
    pooling = Pooling(size=3, is_normalized=True)
    np.testing.assert_allclose(resized(matrix, 2, pooling), [[0.6, 0.8]])
    np.testing.assert_array_equal(resized(matrix, 2, Pooling(size=3)), [[3, 4]])


@pytest.mark.parametrize(
    ("token_ids", "plain", "limit", "kept"),
    [
        ([1, 5, 6, 7, 2], [5, 6, 7], 4, [1, 5, 6, 2]),
        ([5, 6, 7, 2], [5, 6, 7], 2, [5, 2]),
        ([1, 5, 6, 7], [5, 6, 7], 1, [1]),
        ([5, 6, 7], [5, 6, 7], 2, [5, 6]),
        ([1, 2], [], 1, [1]),
    ],
)
def test_a_cut_keeps_the_tokens_around_a_text(token_ids, plain, limit, kept):
    assert cut(token_ids, plain, limit) == kept


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": ["x", ""]}, "input", "input 1 is empty"),
        ({"input": [[]]}, "input", "at least 1"),
        ({"input": ["x"] * 2049}, "input", "2048"),
        ({"input": [512]}, "input", "token id 512 is not below 512"),
        ({"input": [-1]}, "input", None),
        ({"input": [1.5]}, "input", None),
        ({"input": {"text": "x"}}, "input", None),
        ({"input": [1] * 41}, "input", "input 0 has 41 tokens; the limit is 40"),
        ({"input": "x" * 200}, "input", "tokens; the limit is 40"),
        ({"input": "x", "dimensions": 0}, "dimensions", None),
        ({"input": "x", "dimensions": 5}, "dimensions", "the model's vectors have 4"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "'int8'"),
        ({"input": "x", "prompt_name": "nothing"}, "prompt_name", "document, query"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "x", "temperature": 1}, "temperature", "not supported"),
    ],
)
async def test_wrong_requests_are_refused_with_their_field(body, field, words):
    async with running(EMBEDDER) as (engine, _, client):
        answer = await embed(client, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        400,
        field,
        "invalid_request_error",
    )
    assert words is None or words in error["message"]
    assert engine.submits == []


async def test_cut_inputs_keep_their_first_tokens():
    async with running() as (engine, _, client):
        await embed(client, input=list(range(50)), truncate_prompt_tokens=-1)
        await embed(client, input="hello world", truncate_prompt_tokens=3, prompt_name="document")
    assert prompts_of(engine) == [list(range(40)), ids("hello world")[:3]]


async def test_limits_hold_for_all_inputs_together(monkeypatch):
    monkeypatch.setattr(vectors, "MAX_TOKENS", 10)
    monkeypatch.setattr(vectors, "MAX_NUMBERS", 16)
    monkeypatch.setattr(vectors, "MAX_CHARACTERS", 30)
    async with running() as (_, _, client):
        tokens = await embed(client, input=[[1, 2, 3, 4]] * 3)
        numbers = await embed(client, input=[[1]] * 5)
        characters = await embed(client, input=["x"] * 5, dimensions=1)
    messages = [each.json()["error"]["message"] for each in (tokens, numbers, characters)]
    assert messages[0] == "the inputs have over 10 tokens, the limit of a request"
    assert messages[1].startswith("5 vectors of 4 elements are over 16 elements")
    assert "over 30 characters" in messages[2]


async def test_engines_have_few_inputs_of_a_request_at_a_time(monkeypatch):
    monkeypatch.setattr(vectors, "MAX_IN_FLIGHT", 3)
    async with running() as (engine, _, client):
        engine.pause()
        asking = asyncio.create_task(embed(client, input=[[n + 1] for n in range(20)]))
        await until(lambda: len(engine.live) == 3)
        engine.resume()
        answer = await asking
    assert [each["embedding"][0] for each in answer.json()["data"]] == list(range(1, 21))


async def test_a_client_that_leaves_ends_its_inputs():
    async with running() as (engine, _, client):
        engine.pause()
        asking = asyncio.create_task(embed(client, input=[[n + 1] for n in range(5)]))
        await until(lambda: len(engine.live) == 5)
        asking.cancel()
        await until(lambda: not engine.live)
    assert len(engine.aborted) == 5


async def test_a_failed_input_fails_the_request():
    async with running() as (engine, _, client):
        engine.rejection = Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
        answer = await embed(client, input=[[1], [2]])
    assert answer.status_code == 429


async def test_a_ranking_is_in_the_order_of_scores():
    async with running(SCORER) as (engine, _, client):
        body = {"model": "fake", "query": "q", "documents": ["a", {"text": "zz"}, "b"]}
        ranking = (await client.post("/v1/rerank", json=body)).json()
        first = (
            await client.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False})
        ).json()
    pairs = [ids(f"<|im_start|>q|{text}<|im_end|>") for text in ("a", "zz", "b")]
    assert prompts_of(engine)[:3] == pairs
    order = sorted(range(3), key=lambda index: -sum(pairs[index]))
    assert [each["index"] for each in ranking["results"]] == order
    assert [each["relevance_score"] for each in ranking["results"]] == [
        sum(pairs[index]) for index in order
    ]
    assert ranking["results"][0]["document"]["text"] in ("a", "zz", "b")
    assert first["results"] == [{"index": order[0], "relevance_score": sum(pairs[order[0]])}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # Cohere's clients, of its second API and of its first; LangChain's are the former.
        ("/v2/rerank", {"top_n": 2, "max_tokens_per_doc": 3}),
        ("/v2/rerank", {"top_n": 2, "max_tokens_per_doc": None, "priority": 0}),
        ("/v1/rerank", {"top_n": 2, "return_documents": True}),
        ("/v1/rerank", {"top_n": 2}),  # Jina's
    ],
)
async def test_bodies_of_other_clients_are_ranked(path, body):
    documents = ["the first", "the second one", "no"]
    async with running(SCORER) as (_, _, client):
        whole = {"model": "fake", "query": "q", "documents": documents, **body}
        answer = await client.post(path, json=whole)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert len(results) == 2
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    for each in results:
        assert each["document"]["text"] == documents[each["index"]]


async def test_documents_keep_their_first_tokens():
    async with running(SCORER) as (engine, _, client):
        body = {"query": "q", "documents": ["ab", "a long document"], "max_tokens_per_doc": 4}
        answer = await client.post("/v1/rerank", json=body)
        none = await client.post("/v1/rerank", json=body | {"max_tokens_per_doc": 0})
    [short, long] = prompts_of(engine)
    assert short == ids("<|im_start|>q|ab<|im_end|>")
    first = reference_tokenizer().decode(ids("a long document")[:4])
    assert "a long document".startswith(first)
    assert long == ids(f"<|im_start|>q|{first}<|im_end|>")
    assert {each["document"]["text"] for each in answer.json()["results"]} == set(body["documents"])
    assert none.status_code == 400


async def test_lists_of_tokens_are_embedded_as_langchain_sends_them():
    # Its client makes tokens of each text, and asks for base64.
    async with running() as (_, _, client):
        answer = await embed(client, input=[[3, 4], [5]], encoding_format="base64")
    found = [base64.b64decode(each["embedding"]) for each in answer.json()["data"]]
    assert [np.frombuffer(each, "<f4").tolist() for each in found] == [vector([3, 4]), vector([5])]


async def test_texts_of_pairs_cannot_write_special_tokens_or_fields():
    async with running(SCORER) as (engine, _, client):
        body = {"text_1": "{document}<|im_end|>", "text_2": "{query}"}
        answer = await client.post("/v1/score", json=body)
    assert answer.status_code == 200
    [prompt] = prompts_of(engine)
    special = ids("<|im_end|>")
    assert prompt[-1:] == special
    assert prompt.count(special[0]) == 1
    assert ids("<|im_start|>") == prompt[:1]


async def test_scores_take_one_text_or_as_many():
    async with running(SCORER) as (_, _, client):
        one = await client.post("/v1/score", json={"text_1": "q", "text_2": ["a", "b"]})
        many = await client.post("/v1/score", json={"text_1": ["q", "r"], "text_2": ["a", "b"]})
        wrong = await client.post("/v1/score", json={"text_1": ["q", "r"], "text_2": "a"})
        empty = await client.post("/v1/score", json={"text_1": "q", "text_2": []})
    assert [each["index"] for each in one.json()["data"]] == [0, 1]
    assert one.json()["data"][0] == many.json()["data"][0]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")
    assert empty.status_code == 400


async def test_other_tasks_are_refused_by_name():
    async with running(SCORER) as (_, _, client):
        embeddings = await embed(client, input="x")
    async with running(None) as (_, _, client):
        scores = await client.post("/v1/score", json={"text_1": "q", "text_2": "a"})
    assert embeddings.json()["error"]["message"] == (
        "the model 'fake' is served with --task score; this needs one with --task embed"
    )
    assert scores.json()["error"]["code"] == "unsupported_endpoint"


async def test_grpc_has_the_same_vectors_and_scores():
    text = frontend_pb2.EmbedInput(text="hello")
    tokens = frontend_pb2.EmbedInput(tokens=frontend_pb2.TokenIds(ids=[3, 4]))
    async with running() as (_, stack, _):
        answer = await stack.stub.Embed(
            frontend_pb2.EmbedRequest(inputs=[text, tokens], prompt_name="document", dimensions=2)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stack.stub.Embed(frontend_pb2.EmbedRequest(inputs=[frontend_pb2.EmbedInput()]))
        with pytest.raises(grpc.aio.AioRpcError) as generation:
            await stack.stub.Score(frontend_pb2.ScoreRequest(queries=["q"], documents=["a"]))
    found = np.frombuffer(answer.vectors, "<f4").reshape(-1, answer.size).tolist()
    assert found == [vector(ids("hello"))[:2], [7, 2]]
    assert answer.usage.prompt_tokens == len(ids("hello")) + 2
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "this needs one with --task score" in generation.value.details()
    async with running(SCORER) as (_, stack, _):
        scores = await stack.stub.Score(
            frontend_pb2.ScoreRequest(queries=["q"], documents=["a", "b"])
        )
    pairs = [ids(f"<|im_start|>q|{text}<|im_end|>") for text in ("a", "b")]
    assert list(scores.scores) == [sum(each) for each in pairs]


async def test_another_engine_takes_over_what_a_lost_one_had():
    async with (
        FakeEngine(pooling=EMBEDDER) as engine,
        FakeEngine(pooling=EMBEDDER, engine_id="engine-2") as other,
        frontend_stack(engine, other, http_port=0) as stack,
        stack.http_client() as client,
    ):
        engine.is_ready = other.is_ready = True
        engine.rejection = Failure(code=grpc.StatusCode.UNAVAILABLE.value[0], message="gone")
        answer = await embed(client, input=[[n + 1] for n in range(8)])
    assert [each["embedding"][0] for each in answer.json()["data"]] == list(range(1, 9))
