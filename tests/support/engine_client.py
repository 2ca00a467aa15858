"""Requests to a running engine, one call each."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from protos.common.v1.sampling_pb2 import FinishReason, PositionLogprobs, SamplingParams, Usage
from protos.engine.v1.engine_pb2 import GenerateRequest, GetStatsRequest, GetStatsResponse
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub


@dataclass
class Reply:
    """The output of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None
    usage: Usage = field(default_factory=Usage)


@asynccontextmanager
async def engine_stub(address: str) -> AsyncIterator[EngineServiceStub]:
    """Connects to the engine at `address`, over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield EngineServiceStub(channel)


def begin(stub: EngineServiceStub, prompt: Sequence[int], **sampling):
    """Starts a request, greedy unless told otherwise, and returns the call."""
    params = SamplingParams(**{"temperature": 0, **sampling})
    return stub.Generate(GenerateRequest(prompt_token_ids=prompt, sampling=params))


async def generate(stub: EngineServiceStub, prompt: Sequence[int], **sampling) -> Reply:
    """Runs a request to its end, greedily unless told otherwise."""
    reply = Reply()
    async for response in begin(stub, prompt, **sampling):
        reply.token_ids += response.token_ids
        reply.logprobs += response.logprobs
        reply.finish_reason = response.finish_reason
        if response.HasField("stop_token_id"):
            reply.stop_token_id = response.stop_token_id
        reply.usage = response.usage
    return reply


async def get_stats(stub: EngineServiceStub) -> GetStatsResponse:
    """Returns the engine's counters and gauges."""
    return await stub.GetStats(GetStatsRequest())
