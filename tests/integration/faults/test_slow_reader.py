"""A client that does not read, through both real services: it is cut, and slows no other."""

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.held import assert_all_is_given_back, held_by, worker_of
from tests.support.pace import frozen, until_live
from tests.support.processes import stack
from tests.support.waiting import until

NUM_REQUESTS = 48
"""With log-probabilities their output is several times what gRPC keeps for a reader."""
SLOW_LIMIT_S = 6
"""Longer than a busy machine holds up a frontend, which would take that for a client's doing."""


def request(max_tokens: int, *, logprobs: int | None = None) -> pb.GenerateRequest:
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs
    )
    return pb.GenerateRequest(text="x", options=pb.GenerationOptions(sampling=sampling))


async def read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_its_session_ends_with_resource_exhausted_and_others_go_on():
    async with (
        stack(frontend={"slow_reader_timeout_s": SLOW_LIMIT_S}) as services,
        grpc.aio.insecure_channel(services.frontend.address) as channel,
    ):
        stub = FrontendServiceStub(channel)
        baseline = await held_by(services.engine)
        async with grpc.aio.insecure_channel(
            services.frontend.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as slow_channel:
            session = FrontendServiceStub(slow_channel).Session()
            with frozen(worker_of(services.engine)):
                for handle in range(NUM_REQUESTS):
                    generate = request(500, logprobs=20)
                    await session.write(pb.SessionRequest(handle=handle, generate=generate))
                await until_live(services.engine, NUM_REQUESTS)
            await session.read()
            num_tokens = 0
            async for response in stub.Generate(request(300)):
                num_tokens += len(response.output.token_ids)
            assert num_tokens == 300
            # The engine's remaining work may end before.
            await until(lambda: "SlowReaderError" in services.frontend.log, timeout_s=120)
            await until_live(services.engine, 0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(session)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await assert_all_is_given_back(services.engine, baseline)
