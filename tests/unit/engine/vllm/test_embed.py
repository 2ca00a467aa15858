"""Vectors over the foreign protocol through its own stub, around a fake worker."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated.vllm_engine_pb2 import AbortRequest, EmbedRequest, GenerateRequest

from models.config_sections.pooling import PoolingConfig
from tests.support.engine_harness import (
    MAX_MODEL_LEN,
    engine_config,
    model_folder,
    running_service,
)
from tests.support.fake_worker import expected_vector
from tests.support.waiting import until

PROMPT = [3, 1, 4, 1, 5]


@asynccontextmanager
async def gateway(pooling=PoolingConfig(task="embed"), **options):  # noqa: B008  it is frozen
    config = engine_config(vllm_grpc=True, task=pooling.task if pooling else "generate")
    folder = model_folder(pooling=pooling)
    async with running_service(config, model=folder, **options) as service:
        yield service, vllm_engine_pb2_grpc.VllmEngineStub(service.channel)


def ask(prompt=PROMPT, request_id="r"):
    return EmbedRequest(request_id=request_id, tokenized={"input_ids": prompt})


async def refusal_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_prompts_get_their_vectors():
    async with gateway() as (_, stub):
        prompts = [[7] * n for n in (1, 30, 100, MAX_MODEL_LEN)]
        answers = await asyncio.gather(*(stub.Embed(ask(each, "")) for each in prompts))
    for answer, prompt in zip(answers, prompts, strict=True):
        assert list(answer.embedding) == expected_vector(prompt)
        assert (answer.prompt_tokens, answer.embedding_dim) == (len(prompt), len(answer.embedding))


async def test_a_model_of_vectors_says_so():
    async with gateway() as (_, stub):
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        generation = await refusal_of(
            stub.Generate(GenerateRequest(tokenized={"input_ids": PROMPT})).read()
        )
    assert not info.is_generation
    assert info.max_req_input_len == MAX_MODEL_LEN
    assert "it generates no tokens" in generation.details()


@pytest.mark.parametrize(
    ("pooling", "message", "error"),
    [
        (None, ask(), "vectors and scores need --task embed"),
        (PoolingConfig(task="embed"), ask([]), "the prompt is empty"),
        (PoolingConfig(task="embed"), ask([7] * 257), "the limit is 256"),
        (PoolingConfig(task="embed"), ask([2**32 - 1]), "token"),
        (PoolingConfig(task="embed"), ask(request_id="x" * 257), "request_id has 257 characters"),
        (PoolingConfig(task="embed"), EmbedRequest.FromString(b"\xf8\x06\x01"), "has the field"),
    ],
)
async def test_what_cannot_be_served_is_refused(pooling, message, error):
    async with gateway(pooling) as (service, stub):
        refusal = await refusal_of(stub.Embed(message))
        assert not service.core.requests
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error in refusal.details()


async def test_the_same_connection_may_abort_a_request():
    async with gateway(num_steps=0) as (service, stub):
        call = stub.Embed(ask())
        await until(lambda: service.core.load().num_running)
        duplicate = await refusal_of(stub.Embed(ask()))
        await stub.Abort(AbortRequest(request_ids=["r"]))
        aborted = await refusal_of(call)
        assert not service.core.requests
    assert duplicate.code() is grpc.StatusCode.ALREADY_EXISTS
    assert aborted.code() is grpc.StatusCode.UNAVAILABLE


async def test_requests_of_callers_who_leave_or_have_no_time_end():
    async with gateway(num_steps=0) as (service, stub):
        left = stub.Embed(ask())
        await until(lambda: service.core.load().num_running)
        left.cancel()
        late = await refusal_of(stub.Embed(ask(request_id="s"), timeout=0.3))
        await until(lambda: not service.core.requests)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
