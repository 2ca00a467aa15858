"""Greedy output through both services is transformers' output, however the engine is run."""

import asyncio
from dataclasses import dataclass

import grpc
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.pace import together
from tests.support.processes import ServiceProcess, start_engine, start_frontend
from tests.support.transformers_reference import TransformersReference
from tests.support.varied_prompts import varied_prompts

NUM_PROMPTS = 72
MAX_TOKENS = 16


@dataclass(frozen=True)
class Case:
    text: str
    is_chat: bool
    prompt_tokens: int
    output: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    reference = TransformersReference(TINY_CHECKPOINT)
    made = []
    for text, is_chat in varied_prompts(NUM_PROMPTS):
        prompt = reference.encode(text, is_chat=is_chat)
        made.append(Case(text, is_chat, len(prompt), reference.generate(prompt, MAX_TOKENS)))
    return made


async def _ask(stub: frontend_pb2_grpc.FrontendServiceStub, case: Case) -> list[int]:
    options = frontend_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    )
    if case.is_chat:
        message = frontend_pb2.ChatMessage(role="user", content=case.text)
        call = stub.Chat(frontend_pb2.ChatRequest(options=options, messages=[message]))
    else:
        call = stub.Generate(frontend_pb2.GenerateRequest(options=options, text=case.text))
    outputs = [response.output async for response in call]
    assert outputs[-1].usage.prompt_tokens == case.prompt_tokens
    return [token for output in outputs for token in output.token_ids]


async def _run(
    frontend: ServiceProcess, engine: ServiceProcess, cases: list[Case], concurrency: int
) -> tuple[list[list[int]], engine_pb2.GetStatsResponse]:
    gate = asyncio.Semaphore(concurrency)
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)

        async def one(case: Case) -> list[int]:
            async with gate:
                return await _ask(stub, case)

        async with together(engine, concurrency):
            asked = asyncio.gather(*(one(case) for case in cases))
        outputs = await asked
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stats = await engine_pb2_grpc.EngineServiceStub(channel).GetStats(
            engine_pb2.GetStatsRequest()
        )
    return outputs, stats


@pytest.mark.parametrize(
    ("concurrency", "flags", "preempts"),
    [
        pytest.param(1, {"max_num_batched_tokens": 512}, False, id="alone"),
        pytest.param(64, {"max_num_batched_tokens": 512}, False, id="64-at-a-time"),
        pytest.param(
            64,
            {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
            False,
            id="64-without-prefix-cache",
        ),
        pytest.param(64, {"max_num_batched_tokens": 16}, False, id="64-in-chunks-of-16"),
        pytest.param(
            64,
            {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
            False,
            id="64-in-chunks-of-16-without-prefix-cache",
        ),
        pytest.param(
            64,
            {"max_num_batched_tokens": 512, "num_kv_blocks": 80, "max_model_len": 1024},
            True,
            id="64-with-few-blocks",
        ),
    ],
)
async def test_greedy_output_equals_transformers(cases, concurrency, flags, preempts):
    with start_engine(**flags) as engine, start_frontend(engine.address) as frontend:
        outputs, stats = await _run(frontend, engine, cases, concurrency)
    different = [
        (case.text[:60], case.output, output)
        for case, output in zip(cases, outputs, strict=True)
        if case.output != output
    ]
    assert different == []
    assert (stats.num_preemptions > 0) == preempts
    assert stats.num_running == stats.num_waiting == 0
