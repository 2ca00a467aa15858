"""Standard error that takes nothing, from the start: a full pipe, a full disk."""

import asyncio
import contextlib
import os
import urllib.request

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.held import children, worker_of
from tests.support.processes import free_port, start_engine, start_frontend
from tests.support.waiting import until


@contextlib.contextmanager
def full_pipe():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def full_disk():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


async def chat(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="What is 7 + 5?")],
            options=pb.GenerationOptions(sampling=SamplingParams(temperature=0, max_tokens=8)),
        )
        answers = FrontendServiceStub(channel).Chat(request, timeout=60)
        return "".join([answer.output.text async for answer in answers])


def num_dropped(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return next(
        float(line.split()[1])
        for line in lines
        if line.startswith("octavo_log_lines_dropped_total")
    )


@pytest.mark.parametrize("broken", [full_pipe, full_disk])
async def test_services_start_serve_and_recover_although_no_line_can_be_written(broken):
    ports = [free_port(), free_port()]
    engine = start_engine(metrics_port=ports[0])
    frontend = start_frontend(engine.address, metrics_port=ports[1])
    with broken() as fd:
        engine.stderr = frontend.stderr = fd
        async with engine, frontend:
            await asyncio.to_thread(frontend.wait_ready)
            expected = await chat(frontend.address)
            assert "12" in expected
            lost = worker_of(engine)
            lost.kill()
            # Until then the engine may not have noticed.
            await until(lambda: any(child.pid != lost.pid for child in children(engine)))
            await asyncio.to_thread(engine.wait_ready)
            await asyncio.to_thread(frontend.wait_ready)
            assert await chat(frontend.address) == expected
            if broken is not full_pipe:  # there, lines wait
                assert min([await asyncio.to_thread(num_dropped, port) for port in ports]) > 0
            assert [engine.stop(), frontend.stop()] == [0, 0]
