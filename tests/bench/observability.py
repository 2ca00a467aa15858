"""Cost of observability per token: `python -m tests.bench.observability`.

Both services as processes, the worker a paced stand-in, requests of --output tokens in a closed
loop through one frontend session. In turn, --repeats times: nothing observed; metrics scraped every
second; every request traced to a collector; both. The figures are CPU of each service per token
over that of the unobserved run. Counts and histograms are always on: what they take is measured by
itself, as a share of the unobserved run.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import time
import urllib.request
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import grpc
import structlog
import uvloop

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams, Usage
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.engine.checkpoint.tokenizer_files import TokenizerFile, TokenizerFiles
from services.engine.core.latencies import Latencies
from services.engine.request import RequestOutput, StepMark
from services.engine.scheduler.step_outputs import StepOutputs
from services.engine.server import EngineServer
from services.frontend.engine_client.tokenizer_files import tokenizer_sha256
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.request_log import RequestLog
from services.transport.grpc_options import channel_options
from tests.bench.engine_grpc import PacedExecutor
from tests.bench.machine import cpu_s
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.engine_harness import RecordingSink, engine_config, make_request, model_folder
from tests.support.otlp_collector import OtlpCollector
from tests.support.processes import free_port, start_frontend

WARM_UP_S = 1.0
SCRAPE_INTERVAL_S = 1.0
VARIANTS = {"unobserved": (), "metrics": ("metrics",), "traces": ("traces",)}
VARIANTS["metrics and traces"] = ("metrics", "traces")
MAX_MODEL_LEN = 512


def serve_engine(streams: int, step_s: float, settings: dict[str, object], ready: Connection):
    """Runs the engine's service; the child process."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    num_blocks = streams * 64
    config = engine_config(
        max_num_seqs=streams,
        max_num_waiting=2 * streams,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=num_blocks,
        heartbeat_interval_ms=500,
        **settings,
    )
    files = tokenizer_files()
    tokenizer = TokenizerFiles(
        tuple(TokenizerFile(name, content) for name, content in sorted(files.items())),
        tokenizer_sha256(files),
    )

    async def run() -> None:
        model = model_folder(max_model_len=MAX_MODEL_LEN, vocab_size=512, tokenizer=tokenizer)
        server = EngineServer(config, model, lambda: PacedExecutor(step_s, num_blocks))
        ready.send(await server.start())
        await server.wait()

    uvloop.run(run())


@contextlib.asynccontextmanager
async def stack(
    arguments: argparse.Namespace, observed: tuple[str, ...]
) -> AsyncIterator[tuple[dict[str, int], str, list[int]]]:
    """Runs both services; yields their process ids, the frontend's address, metrics ports."""
    with contextlib.ExitStack() as exits:
        settings: list[dict[str, object]] = [{}, {}]
        ports = [free_port(), free_port()] if "metrics" in observed else []
        for each, port in zip(settings, ports, strict=False):
            each["metrics_port"] = port
        if "traces" in observed:
            collector = exits.enter_context(OtlpCollector())
            for each in settings:
                each["otlp_endpoint"] = collector.endpoint
        context = multiprocessing.get_context("spawn")
        receiving, sending = context.Pipe(duplex=False)
        engine = context.Process(
            target=serve_engine,
            args=(arguments.streams, arguments.step_ms / 1000, settings[0], sending),
            daemon=True,
        )
        engine.start()
        exits.callback(engine.join)
        exits.callback(engine.terminate)
        address = f"127.0.0.1:{await asyncio.to_thread(receiving.recv)}"
        async with start_frontend(address, **settings[1]) as frontend:
            assert engine.pid is not None
            pids = {"engine": engine.pid, "frontend": frontend.pid}
            yield pids, frontend.address, ports


async def drive(address: str, arguments: argparse.Namespace, counts: list[int]) -> None:
    """Keeps `streams` requests live for ever and counts their tokens."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=arguments.output)
    request = pb.GenerateRequest(
        text="The quick brown fox", options=pb.GenerationOptions(sampling=sampling)
    )
    async with grpc.aio.insecure_channel(address, options=channel_options(2**24)) as channel:
        call = FrontendServiceStub(channel).Session()
        for handle in range(arguments.streams):
            await call.write(pb.SessionRequest(handle=handle, generate=request))
        while (response := await call.read()) is not grpc.aio.EOF:
            counts[0] += len(response.output.token_ids)
            if response.output.finish_reason:
                await call.write(pb.SessionRequest(handle=response.handle, generate=request))


async def scrape(ports: list[int]) -> None:
    """Reads the metrics for ever, more often than Prometheus does."""
    while ports:
        for port in ports:
            url = f"http://127.0.0.1:{port}/metrics"
            await asyncio.to_thread(lambda url=url: urllib.request.urlopen(url).read())
        await asyncio.sleep(SCRAPE_INTERVAL_S)


async def measure(arguments: argparse.Namespace, observed: tuple[str, ...]) -> dict[str, float]:
    """Returns the CPU time per token of each service, in microseconds."""
    counts = [0]
    async with stack(arguments, observed) as (pids, address, ports):
        tasks = [asyncio.create_task(drive(address, arguments, counts))]
        tasks.append(asyncio.create_task(scrape(ports)))
        await asyncio.sleep(WARM_UP_S)
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        counted = counts[0]
        await asyncio.sleep(arguments.seconds)
        num_tokens = counts[0] - counted
        spent = {name: 1e6 * (cpu_s(pid) - before[name]) for name, pid in pids.items()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {name: us / num_tokens for name, us in spent.items()}


def counting_us(streams: int, num_steps: int = 2000) -> dict[str, float]:
    """Returns the cost of counting per token: histograms of the engine and of the frontend."""
    latencies = Latencies()
    requests = [make_request(RecordingSink()) for _ in range(streams)]
    previous, mark = StepMark(1, 0.01), StepMark(2, 0.02)
    for request in requests:
        request.last_token = mark
    others = [RequestOutput(request, [5], previous=previous) for request in requests]
    started_s = time.process_time()
    for _ in range(num_steps):
        latencies.count_step(StepOutputs(others=others))
    engine_s = time.process_time() - started_s
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    output = Output(
        request_id="r",
        text="x",
        token_ids=[5],
        finish_reason=FinishReason.FINISH_REASON_UNSPECIFIED,
        usage=Usage(),
    )
    num_outputs = streams * num_steps
    with RequestLog().watch("r", method="bench") as record:
        started_s = time.process_time()
        for _ in range(num_outputs):
            record.observe(output)
        frontend_s = time.process_time() - started_s
    return {"engine": 1e6 * engine_s / num_outputs, "frontend": 1e6 * frontend_s / num_outputs}


def report(rounds: list[dict[str, dict[str, float]]], streams: int) -> dict[str, float]:
    """Returns CPU per token, ratios, and the share of counting, each from the least of its runs.

    Other work on the machine only ever adds to a run.
    """
    counted = counting_us(streams)
    figures: dict[str, float] = {}
    for service in ("engine", "frontend"):
        least = {name: min(each[name][service] for each in rounds) for name in VARIANTS}
        unobserved = least["unobserved"]
        figures[f"{service}, unobserved, us per token"] = round(unobserved, 2)
        figures[f"{service}, counting, us per token"] = round(counted[service], 3)
        figures[f"{service}, counting / unobserved"] = round(counted[service] / unobserved, 4)
        for name in list(VARIANTS)[1:]:
            figures[f"{service}, {name} / unobserved"] = round(least[name] / unobserved, 3)
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--output", type=int, default=128, help="tokens of each request")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rounds = [
        {name: uvloop.run(measure(arguments, observed)) for name, observed in VARIANTS.items()}
        for _ in range(arguments.repeats)
    ]
    figures = report(rounds, arguments.streams)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:48}{value:>10}")


if __name__ == "__main__":
    main()
