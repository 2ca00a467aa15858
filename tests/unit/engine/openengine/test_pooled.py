"""Vectors and scores over OpenEngine's protocol, around a fake worker."""

import asyncio
import gc
import tracemalloc
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from models.config_sections.pooling import PoolingConfig
from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    AbortRequest,
    EmbedRequest,
    GenerateRequest,
    GetModelInfoRequest,
    ScoreRequest,
)
from protos.openengine.v1.openengine_pb2_grpc import ControlStub, InferenceStub
from services.engine.edge.pooled_call import MAX_IN_FLIGHT
from services.engine.openengine.pooled import MAX_PROMPTS
from services.engine.request import Request
from tests.support.engine_harness import engine_config, model_folder, running_service
from tests.support.fake_worker import expected_vector
from tests.support.waiting import until

EMBED = PoolingConfig(task="embed")
SCORE = PoolingConfig(task="score", answers=(3, 4))
SPARSE = openengine_pb2.EMBEDDING_ENCODING_SPARSE
TOKENS = openengine_pb2.TASK_OUTPUT_GRANULARITY_TOKEN


@asynccontextmanager
async def orchestrated(pooling=EMBED, **options):
    task = pooling.task if pooling else "generate"
    config = engine_config(openengine_grpc=True, task=task, max_num_waiting=2 * MAX_IN_FLIGHT)
    async with running_service(config, model=model_folder(pooling=pooling), **options) as service:
        yield service, InferenceStub(service.channel), ControlStub(service.channel)


def item(name, ids):
    return {"item_id": name, "token_ids": {"ids": ids}}


def embed(*prompts, request_id="r", **options):
    inputs = [item(f"i{number}", prompt) for number, prompt in enumerate(prompts)]
    return EmbedRequest(context={"request_id": request_id}, inputs=inputs, options=options)


def group(query, *candidates, name="g"):
    named = [item(f"c{number}", each) for number, each in enumerate(candidates)]
    return {"group_id": name, "query": item("q", query), "candidates": named}


def score(*groups, **options):
    return ScoreRequest(context={"request_id": "r"}, groups=groups, options=options)


async def refusal_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_inputs_get_their_vectors_in_order():
    prompts = [[7] * (1 + number % 5) + [number % 90] for number in range(3 * MAX_IN_FLIGHT)]
    async with orchestrated() as (service, inference, _):
        answer = await inference.Embed(embed(*prompts))
        assert not service.core.requests
    assert answer.request_id == "r"
    for index, (output, prompt) in enumerate(zip(answer.outputs, prompts, strict=True)):
        assert (output.item_id, output.input_index) == (f"i{index}", index)
        assert output.HasField("input_index")
        assert list(output.dense.shape) == [len(output.dense.values)]
        assert list(output.dense.values) == expected_vector(prompt)
    assert answer.usage.input_tokens == sum(map(len, prompts))
    assert answer.usage.HasField("cached_input_tokens")


async def test_shorter_vectors_have_length_one_again_where_the_models_have():
    for pooling in (EMBED, PoolingConfig(task="embed", is_normalized=True)):
        async with orchestrated(pooling) as (_, inference, _):
            answer = await inference.Embed(
                embed([3, 4], dimensions=1, normalize=pooling.is_normalized)
            )
        expected = [1.0] if pooling.is_normalized else expected_vector([3, 4])[:1]
        np.testing.assert_allclose(answer.outputs[0].dense.values, expected)


async def test_candidates_get_the_scores_of_their_queries():
    groups = [group([1, 2], [3], [4, 5]), group([6], [7, 8, 9], name="h")]
    async with orchestrated(SCORE) as (_, inference, _):
        answer = await inference.Score(score(*groups))
    assert answer.higher_is_better
    assert answer.semantics == openengine_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
    assert answer.normalization == openengine_pb2.SCORE_NORMALIZATION_SOFTMAX
    found = [
        (each.group_id, each.group_index, own.candidate_id, own.candidate_index)
        for each in answer.groups
        for own in each.candidates
    ]
    assert found == [("g", 0, "c0", 0), ("g", 0, "c1", 1), ("h", 1, "c0", 0)]
    scores = [list(own.scores.values) for each in answer.groups for own in each.candidates]
    pairs = ([1, 2, 3], [1, 2, 4, 5], [6, 7, 8, 9])
    assert scores == [expected_vector(pair) for pair in pairs]
    assert answer.usage.input_tokens == 11


async def test_the_model_says_what_it_takes():
    async with orchestrated() as (_, inference, control):
        info = await control.GetModelInfo(GetModelInfoRequest())
        refused = await refusal_of(
            inference.Generate(GenerateRequest(token_ids={"ids": [1]})).read()
        )
    assert info.tasks.embed.supported
    assert info.tasks.embed.max_batch_size == MAX_PROMPTS
    assert not info.HasField("generation")
    assert not info.tasks.HasField("score")
    assert "it generates no tokens" in refused.details()
    async with orchestrated(SCORE) as (_, _, control):
        info = await control.GetModelInfo(GetModelInfoRequest())
    assert info.tasks.score.higher_is_better
    async with orchestrated(None) as (_, _, control):
        info = await control.GetModelInfo(GetModelInfoRequest())
    assert not info.HasField("tasks")


@pytest.mark.parametrize(
    ("pooling", "message", "error"),
    [
        (None, embed([1]), "is served with --task generate; this needs --task embed"),
        (SCORE, embed([1]), "is served with --task score"),
        (EMBED, score(group([1], [2])), "this needs --task score"),
        (EMBED, embed(), "there are 0 inputs"),
        (EMBED, embed(*([1] for _ in range(MAX_PROMPTS + 1))), "the limit|1 to 2048"),
        (EMBED, embed([1], []), "the prompt is empty"),
        (EMBED, embed([7] * 300), "the limit is 256"),
        (EMBED, embed([2**32 - 1]), "token"),
        (EMBED, embed([1], granularity=TOKENS), "granularity is token"),
        (EMBED, embed([1], encoding=SPARSE), "encoding is sparse"),
        (EMBED, embed([1], normalize=True), "normalize is True"),
        (EMBED, embed([1], dimensions=0), "dimensions is 0"),
        (EMBED, embed([1], dimensions=2**20), "dimensions is 1048576"),
        (EMBED, embed([1], request_id="x" * 257), "request_id has 257"),
        (EMBED, EmbedRequest(inputs=[item("a", [1]), item("a", [2])]), "item_id must be there"),
        (EMBED, EmbedRequest(inputs=[item("", [1])]), "item_id must be there"),
        (EMBED, EmbedRequest(inputs=[{"item_id": "a", "text": "b"}]), "send token_ids"),
        (EMBED, EmbedRequest(inputs=[{"item_id": "a"}]), "send token_ids"),
        (EMBED, EmbedRequest(inputs=[{"item_id": "a", "multimodal": {}}]), "send token_ids"),
        (EMBED, EmbedRequest.FromString(b"\xf8\x06\x01"), "has the field"),
        (SCORE, score(), "there are 0 inputs"),
        (SCORE, score(group([1])), "there are 0 inputs"),
        (SCORE, score(group([1], [2]), group([1], [2])), "group_id must be there"),
        (SCORE, score(group([1], [2]), label_token_ids=[3]), "label_token_ids is not served"),
        (SCORE, score(group([1], [2]), instruction="rank"), "instruction is not served"),
        (SCORE, score(group([1], [2]), normalization=1), "normalization is 1"),
        (SCORE, score(group([1], [2]), output_semantics=1), "output_semantics is 1"),
        (SCORE, score(group([1], [2]), granularity=TOKENS), "granularity is token"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused(pooling, message, error):
    async with orchestrated(pooling) as (service, inference, _):
        method = inference.Embed if isinstance(message, EmbedRequest) else inference.Score
        refusal = await refusal_of(method(message))
        assert not service.core.requests
        assert service.core.counters.rejected
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(each in refusal.details() for each in error.split("|"))


async def test_unknown_models_and_adapters_are_not_found():
    async with orchestrated() as (_, inference, _):
        for name in ("model", "lora_name"):
            message = embed([1])
            setattr(message.context, name, "other")
            assert (await refusal_of(inference.Embed(message))).code() is grpc.StatusCode.NOT_FOUND


async def test_a_call_is_aborted_whole_and_one_that_leaves_ends_its_requests():
    many = embed(*([number + 1] for number in range(MAX_IN_FLIGHT + 9)))
    async with orchestrated(num_steps=0) as (service, inference, control):
        call = asyncio.ensure_future(inference.Embed(many))
        await until(lambda: len(service.core.requests) == MAX_IN_FLIGHT)
        duplicate = await refusal_of(inference.Embed(many))
        await control.Abort(AbortRequest(request_id="r"))
        aborted = await refusal_of(call)
        await until(lambda: not service.core.requests)
        left = inference.Embed(many)
        await until(lambda: service.core.requests)
        left.cancel()
        await until(lambda: not service.core.requests)
        late = await refusal_of(inference.Embed(many, timeout=0.3))
        await until(lambda: not service.core.requests)
    assert duplicate.code() is grpc.StatusCode.ALREADY_EXISTS
    assert aborted.code() is grpc.StatusCode.UNAVAILABLE
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_holds_the_pairs_alone_that_run():
    many = score(group([7] * 200, *([1 + number % 90] for number in range(MAX_PROMPTS))))
    many.context.request_id = "pairs"
    async with orchestrated(SCORE, num_steps=0) as (service, inference, _):
        call = inference.Score(many)
        await until(lambda: len(service.core.requests) == MAX_IN_FLIGHT)
        # Requests of earlier tests may live, too, and so may proxies of what does not.
        requests = [each for each in gc.get_objects() if type(each) is Request]
        held = sum(each.request_id.startswith("pairs") for each in requests)
        call.cancel()
        await until(lambda: not service.core.requests)
    assert MAX_IN_FLIGHT <= held < 2 * MAX_IN_FLIGHT


async def test_a_query_that_is_too_long_is_refused_before_its_pairs_are_made():
    many = score(group([7] * 2**17, *([1] for _ in range(500))))
    async with orchestrated(SCORE) as (_, inference, _):
        tracemalloc.start()
        try:
            refusal = await refusal_of(inference.Score(many))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert "the limit is 256" in refusal.details()
    assert most < 2**26
