"""CPU that the engine's service process spends per token: `python -m tests.bench.engine_grpc`.

The service runs in a process of its own, with a paced stand-in for the worker, which answers every
step after --step-ms with one token per request, at next to no cost. So the figure holds gRPC,
session, sinks, step loop and scheduler; the scheduler's share is also shown. The CPU of
the idle service, heartbeats included, is subtracted.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection

import grpc
import numpy as np
import psutil
import structlog
import uvloop

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import (
    Credit,
    FrontendHello,
    FrontendMessage,
    GenerateRequest,
    GetStatsRequest,
    Submit,
)
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.batch import BatchDescriptor, StepResult, step_result
from services.engine.server import EngineServer
from services.transport.grpc_options import channel_options
from tests.support.engine_harness import engine_config, model_folder

MAX_MODEL_LEN = 1 << 20
PROMPT = list(range(1, 17))
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Figures:
    """One run."""

    mode: str
    streams: int
    frontends: int
    step_ms: float
    tokens: int
    tokens_per_s: float
    idle_cpu_percent: float
    cpu_us_per_token: float
    schedule_us_per_token: float
    cpu_us_per_step: float


class PacedExecutor:
    """A worker that takes step_s for every step and samples the same token for every request."""

    pid = None

    def __init__(self, step_s: float, num_blocks: int) -> None:
        self._step_s = step_s
        self._num_blocks = num_blocks
        self._sent: deque[BatchDescriptor] = deque()
        self._has_work = asyncio.Event()
        self._next_s = 0.0

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Is ready at once."""
        del on_progress
        return WorkerReady(num_blocks=self._num_blocks, device_name="none", dtype="none")

    def send(self, descriptor: BatchDescriptor) -> None:
        """Queues a step."""
        self._sent.append(descriptor)
        self._has_work.set()

    def order_profile(self, order: object, answer: object) -> None:
        """Takes no profiles: no engine of this program has a folder for them."""

    async def receive(self) -> StepResult:
        """Returns the next step's result when its time has come."""
        while not self._sent:
            self._has_work.clear()
            await self._has_work.wait()
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._step_s, now_s)
        await asyncio.sleep(self._next_s - now_s)
        descriptor = self._sent.popleft()
        num_tokens = len(descriptor.sampling.sample_indices) // 4
        return step_result(descriptor.step_id, np.full(num_tokens, 5), elapsed_us=1)

    async def stop(self) -> None:
        """Has nothing to end."""


def serve(streams: int, step_s: float, port: Connection) -> None:
    """Runs the service; the child process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    blocks = streams * 4096
    config = engine_config(
        max_num_seqs=streams,
        max_num_waiting=2 * streams,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=blocks,
        heartbeat_interval_ms=500,
    )

    async def run() -> None:
        model = model_folder(max_model_len=MAX_MODEL_LEN)
        server = EngineServer(config, model, lambda: PacedExecutor(step_s, blocks))
        port.send(await server.start())
        await server.wait()

    uvloop.run(run())


def sampling() -> SamplingParams:
    """Returns sampling that never ends by itself."""
    return SamplingParams(temperature=0, ignore_eos=True)


async def drive_session(
    stub: EngineServiceStub, streams: int, counts: list[int], name: str = "bench"
) -> None:
    """Runs all requests over one session and counts their tokens for ever."""
    call = stub.Session()
    await call.write(FrontendMessage(hello=FrontendHello(frontend_id=name)))
    prompt = np.array(PROMPT, "<u4").tobytes()
    for handle in range(streams):
        submit = Submit(
            handle=handle,
            request_id=f"{name}-{handle}",
            prompt_token_ids=prompt,
            sampling=sampling(),
        )
        await call.write(FrontendMessage(submit=submit))
    steps_read = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.HasField("step"):
            steps_read += 1
            counts[0] += len(message.step.token_ids) // 4
            if steps_read % 16 == 0:
                await call.write(FrontendMessage(credit=Credit(steps_read=steps_read)))


async def drive_sessions(
    stub: EngineServiceStub, streams: int, counts: list[int], frontends: int
) -> None:
    """Shares the requests among sessions of several frontends."""
    own = [streams // frontends + (number < streams % frontends) for number in range(frontends)]
    await asyncio.gather(
        *(drive_session(stub, count, counts, f"bench-{n}") for n, count in enumerate(own))
    )


async def drive_calls(stub: EngineServiceStub, streams: int, counts: list[int]) -> None:
    """Runs every request over a call of its own and counts the tokens for ever."""

    async def drive_one() -> None:
        call = stub.Generate(GenerateRequest(prompt_token_ids=PROMPT, sampling=sampling()))
        while (response := await call.read()) is not grpc.aio.EOF:
            counts[0] += len(response.token_ids)

    await asyncio.gather(*(drive_one() for _ in range(streams)))


async def measure(arguments: argparse.Namespace, port: int, pid: int) -> Figures:
    """Drives the service and reads its CPU time over the middle of the run."""
    process = psutil.Process(pid)

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    drive: Callable[..., Awaitable[None]] = drive_calls
    if arguments.mode == "session":
        drive = partial(drive_sessions, frontends=arguments.frontends)
    options = channel_options(16 * 2**20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub = EngineServiceStub(channel)
        await stub.GetStats(GetStatsRequest(), wait_for_ready=True)
        idle_started = cpu_s()
        await asyncio.sleep(2)
        idle_share = (cpu_s() - idle_started) / 2
        counts = [0]
        driving = asyncio.create_task(drive(stub, arguments.streams, counts))
        await asyncio.sleep(WARM_UP_S)
        before = await stub.GetStats(GetStatsRequest())
        started_s, cpu_started, counted = time.monotonic(), cpu_s(), counts[0]
        await asyncio.sleep(arguments.seconds)
        elapsed_s, tokens = time.monotonic() - started_s, counts[0] - counted
        busy_s = cpu_s() - cpu_started - idle_share * elapsed_s
        after = await stub.GetStats(GetStatsRequest())
        driving.cancel()
    return Figures(
        mode=arguments.mode,
        streams=arguments.streams,
        frontends=arguments.frontends,
        step_ms=arguments.step_ms,
        tokens=tokens,
        tokens_per_s=round(tokens / elapsed_s, 1),
        idle_cpu_percent=round(100 * idle_share, 2),
        cpu_us_per_token=round(1e6 * busy_s / tokens, 2),
        schedule_us_per_token=round((after.schedule_us - before.schedule_us) / tokens, 2),
        cpu_us_per_step=round(1e6 * busy_s / (after.num_steps - before.num_steps), 1),
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--frontends", type=int, default=1, help="sessions that share them")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of one step")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the measurement")
    parser.add_argument("--mode", choices=["session", "generate"], default="session")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    service = context.Process(
        target=serve, args=(arguments.streams, arguments.step_ms / 1000, sending), daemon=True
    )
    service.start()
    try:
        assert service.pid is not None
        figures = uvloop.run(measure(arguments, receiving.recv(), service.pid))
    finally:
        service.terminate()
        service.join()
    if arguments.json:
        print(json.dumps(asdict(figures)))
        return
    for name, value in asdict(figures).items():
        print(f"{name:24}{value:>14}")


if __name__ == "__main__":
    main()
