"""Hostile calls of the foreign protocol cost themselves alone, and leave no trace."""

import asyncio
import math
from dataclasses import replace

import grpc
import pytest
from smg_grpc_proto.generated.vllm_engine_pb2 import AbortRequest, GenerateRequest
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from services.engine.vllm.servicer import MAX_ABORTED
from tests.support.waiting import until
from tests.unit.engine.vllm.test_servicer import LONG, TINY, ask, completes, gateway, responses

HOSTILE = [
    ask(temperature=math.nan),
    ask(top_p=-1.0),
    ask(min_p=math.inf),
    ask(repetition_penalty=-0.5),
    ask(frequency_penalty=math.nan),
    ask(logit_bias={5: math.nan}),
    ask(logit_bias=dict.fromkeys(range(2000), 1.0)),
    ask(logprobs=2**31 - 1),
    ask(prompt_logprobs=2**31 - 1),
    ask(min_tokens=2**32 - 1),
    ask(n=2**32 - 1),
    ask(stop=["x"] * 1000),
    ask(stop=[""]),
    ask(stop_token_ids=[7] * 1000),
    ask(prompt=[2**32 - 1]),
    ask(prompt=[7] * 10_000, n=16),
    ask(n=16, regex="("),
    ask(json_schema="{" * 1000),
    ask(choice={"choices": ["a"] * 2000}),
    ask(request_id="x" * 257),
    GenerateRequest(),
    GenerateRequest(extra_mm_inputs=[{}] * 1000),
    GenerateRequest.FromString(b"\xf8\x06\x01"),
]


async def status_of(call) -> grpc.StatusCode:
    try:
        await responses(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.OK


async def test_nothing_is_left_of_hostile_cancelled_and_late_calls():
    async with gateway({"max_num_waiting": 64}, model=TINY, vocab_size=TINY.vocab_size) as (
        service,
        stub,
    ):
        [first] = await completes(stub.Generate(ask()))
        before = replace(service.core.load(), num_recent_tokens=0)
        num_tasks = len(asyncio.all_tasks())
        statuses = {await status_of(stub.Generate(message)) for message in HOSTILE}
        assert statuses == {grpc.StatusCode.INVALID_ARGUMENT}
        structured = {"regex": "[ab]{100}", "max_tokens": LONG, "n": 3}
        late = [
            stub.Generate(ask(request_id=f"late-{i}", **structured), timeout=0.001 * i)
            for i in range(20)
        ]
        cancelled = [stub.Generate(ask(request_id=f"cut-{i}", **structured)) for i in range(20)]
        reading = [asyncio.create_task(status_of(call)) for call in (*late, *cancelled)]
        for call in cancelled:
            call.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*reading)
        # Tokens computed lately are forgotten bit by bit.
        await until(lambda: replace(service.core.load(), num_recent_tokens=0) == before)
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        [again] = await completes(stub.Generate(ask()))
        assert again.output_ids == first.output_ids


async def test_abort_leaves_requests_of_other_connections_alone():
    async with gateway(num_steps=1) as (service, stub):
        call = stub.Generate(ask(max_tokens=8, stream=True))
        await call.read()
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}", options) as channel:
            await VllmEngineStub(channel).Abort(AbortRequest(request_ids=["r"]))
        service.executors.last.resume()
        assert (await responses(call))[-1].complete.finish_reason == "length"


async def test_abort_names_no_more_requests_than_there_can_be():
    async with gateway() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(AbortRequest(request_ids=["x"] * (MAX_ABORTED + 1)))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("draining", [False, True])
async def test_calls_before_the_engine_is_ready_and_while_it_drains_are_unavailable(draining):
    options = {} if draining else {"start_error": "no weights"}
    async with gateway(**options) as (service, stub):
        if draining:
            await service.core.drain.run(0)
        calls = [stub.Generate(ask(request_id=f"r{i}", n=16)) for i in range(20)]
        statuses = {await status_of(call) for call in calls}
        assert statuses == {grpc.StatusCode.UNAVAILABLE}
        assert service.core.counters.rejected == {"UNAVAILABLE": 20}
