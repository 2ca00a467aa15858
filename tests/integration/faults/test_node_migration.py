"""A frontend with two engines, of which one has a second host: when that is lost, requests move."""

import asyncio
import signal

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.engine_client import engine_stub, get_stats
from tests.support.engine_fleet import num_ready
from tests.support.nodes import NodeProcess
from tests.support.processes import start_engine, start_frontend
from tests.support.waiting import until

NUM_TOKENS = 60
NUM_REQUESTS = 2


def request(index):
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
    return pb.GenerateRequest(
        text=f"Once upon a time, there were {index} foxes and",
        options=pb.GenerationOptions(sampling=sampling),
    )


async def ask(stub, index):
    """Returns the text of a request."""
    return "".join([each.output.text async for each in stub.Generate(request(index))])


async def test_requests_move_to_another_engine_when_a_node_is_lost():
    wide = start_engine(
        device="cpu",
        tensor_parallel_size=2,
        num_nodes=2,
        node_silence_timeout_s=60,
        step_timeout_s=600,
        worker_patience_s=0,
        kv_cache_memory_mb=64,
    )
    other = start_engine(device="cpu", kv_cache_memory_mb=64)
    frontend = start_frontend(f"{wide.address},{other.address}")
    with NodeProcess(wide.address) as node, wide, frontend:
        async with (
            grpc.aio.insecure_channel(frontend.address) as channel,
            engine_stub(wide.address) as engine,
            asyncio.timeout(300),
        ):
            stub = FrontendServiceStub(channel)
            expected = [await ask(stub, index) for index in range(NUM_REQUESTS)]
            # Requests of this engine cannot end before its node does.
            for rank in node.ranks:
                rank.send_signal(signal.SIGSTOP)
            running = [asyncio.create_task(ask(stub, index)) for index in range(NUM_REQUESTS)]
            while not (await get_stats(engine)).num_running:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.01)
            async with other:
                while num_ready(await list_engines(stub)) < 2:  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.01)
                node.kill()
                assert await asyncio.gather(*running) == expected
                listing = await list_engines(stub)
                assert listing.num_migrations + listing.num_retries > 0
                node.wait()
            # No engine is left, which callers learn at once.
            with pytest.raises(grpc.RpcError) as caught:
                await ask(stub, 1)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            node.start()
            await until(wide.is_serving, timeout_s=120)


async def list_engines(stub):
    return await stub.ListEngines(pb.ListEnginesRequest())
