"""CPU that the frontend spends per token: `python -m tests.bench.frontend_grpc`.

The frontend is the real service in a process of its own. The engine is a stand-in here that sends
one token per request every --step-ms; the client is here, too. The CPU of the idle frontend is
subtracted. A frontend that cannot keep up merges tokens into fewer messages, which makes a token
cheaper, so the figure counts only while `tokens_per_message` is near 1.

With --processes the frontend is a group of that many, the CPU is that of all, and each mode has
four connections per process, which the kernel spreads.

With --tls each mode is measured in plain text and with mutual TLS on both hops, in --rounds of the
order plain, TLS, TLS, plain, and the ratio of their CPU per token is printed last, round by round.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop

from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.transport.grpc_options import channel_options
from services.transport.tls import ServerTls
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.certificates import LOOPBACK, Authority, Pair, credentials
from tests.support.fake_engine import FakeEngine
from tests.support.processes import ServiceProcess, start_frontend

WARM_UP_S = 1.0
IDLE_S = 2.0
TEXT = "The quick brown fox jumps over the lazy dog. "
MAX_MODEL_LEN = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One run."""

    mode: str
    tls: bool
    streams: int
    step_ms: float
    tokens: int
    tokens_per_s: float
    tokens_per_message: float
    idle_cpu_percent: float
    cpu_us_per_token: float


@dataclass
class Counts:
    """Output that the client has read so far."""

    tokens: int = 0
    messages: int = 0

    def add(self, output: pb.Output) -> None:
        """Counts a message."""
        self.tokens += len(output.token_ids)
        self.messages += 1


class Certificates:
    """One certificate for all three, which trust each other by its authority."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self._pair: Pair = self._authority.issue("bench", LOOPBACK)

    def engine(self) -> grpc.ServerCredentials:
        """Returns what the stand-in listens with."""
        pair, authority = self._pair, self._authority
        tls = ServerTls(cert=pair.cert, key=pair.key, client_ca=authority.cert)
        return tls.grpc_credentials()

    def client(self) -> grpc.ChannelCredentials:
        """Returns what a client connects with."""
        return credentials(self._authority, self._pair)

    def frontend_flags(self) -> dict[str, Path]:
        """Returns the frontend's flags for both hops."""
        pair, ca = self._pair, self._authority.cert
        return {
            "tls_cert": pair.cert,
            "tls_key": pair.key,
            "tls_client_ca": ca,
            "engine_tls_ca": ca,
            "engine_tls_cert": pair.cert,
            "engine_tls_key": pair.key,
        }


Drive = Callable[[FrontendServiceStub, list[pb.GenerateRequest], Counts], Awaitable[None]]


async def drive_calls(
    stub: FrontendServiceStub, requests: list[pb.GenerateRequest], counts: Counts
) -> None:
    """Runs every request over a call of its own."""

    async def drive_one(request: pb.GenerateRequest) -> None:
        call = stub.Generate(request)
        while (response := await call.read()) is not grpc.aio.EOF:
            counts.add(response.output)

    await asyncio.gather(*(drive_one(request) for request in requests))


async def drive_session(
    stub: FrontendServiceStub, requests: list[pb.GenerateRequest], counts: Counts
) -> None:
    """Runs all requests over one session."""
    call = stub.Session()
    for handle, request in enumerate(requests):
        await call.write(pb.SessionRequest(handle=handle, generate=request))
    while (response := await call.read()) is not grpc.aio.EOF:
        counts.add(response.output)


MODES: dict[str, Drive] = {"generate": drive_calls, "session": drive_session}


def paced_engine(
    arguments: argparse.Namespace, certificates: Certificates | None = None
) -> FakeEngine:
    """Returns a stand-in whose requests outlast the measurement."""
    tokens = reference_tokenizer().encode(TEXT).ids
    num_steps = int((arguments.seconds + WARM_UP_S + IDLE_S + 10) * 1000 / arguments.step_ms)
    output = tokens * (num_steps // len(tokens) + 1)
    return FakeEngine(
        script=lambda _: output,
        max_model_len=MAX_MODEL_LEN,
        credit_window=64,
        step_s=arguments.step_ms / 1000,
        credentials=certificates and certificates.engine(),
    )


def frontend_of(
    engine: FakeEngine, certificates: Certificates | None, *, processes: int
) -> ServiceProcess:
    """Returns the frontend, not started."""
    if certificates is None:
        return start_frontend(engine.address, processes=processes)
    return start_frontend(
        engine.address,
        credentials=certificates.client(),
        processes=processes,
        **certificates.frontend_flags(),
    )


def open_channel(address: str, certificates: Certificates | None) -> grpc.aio.Channel:
    """Returns the client's connection."""
    # Channels of one pool would share a connection.
    options = [*channel_options(16 * 2**20), ("grpc.use_local_subchannel_pool", 1)]
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, certificates.client(), options=options)


async def measure(
    arguments: argparse.Namespace, mode: str, certificates: Certificates | None = None
) -> Figures:
    """Drives the frontend and reads its CPU time over the middle of the run."""
    stop = ["never seen"] if arguments.stop else []
    request = pb.GenerateRequest(text=TEXT, options=pb.GenerationOptions(stop=stop))
    counts = Counts()
    async with (
        paced_engine(arguments, certificates) as engine,
        frontend_of(engine, certificates, processes=arguments.processes) as frontend,
    ):
        num_channels = 1 if arguments.processes == 1 else 4 * arguments.processes
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(frontend.address, certificates))
                for _ in range(num_channels)
            ]
            stubs = [FrontendServiceStub(channel) for channel in channels]
            for stub in stubs:
                await stub.ListModels(pb.ListModelsRequest())
            cpu_s = _cpu_clock(frontend.pid)
            idle_started = cpu_s()
            await asyncio.sleep(IDLE_S)
            idle_share = (cpu_s() - idle_started) / IDLE_S
            share = [request] * (arguments.streams // num_channels)
            driving = asyncio.gather(*(MODES[mode](stub, share, counts) for stub in stubs))
            await asyncio.sleep(WARM_UP_S)
            clock = asyncio.get_running_loop().time
            started_s, cpu_started = clock(), cpu_s()
            tokens, messages = counts.tokens, counts.messages
            await asyncio.sleep(arguments.seconds)
            elapsed_s, busy_s = clock() - started_s, cpu_s() - cpu_started
            tokens, messages = counts.tokens - tokens, counts.messages - messages
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
    return Figures(
        mode=mode,
        tls=certificates is not None,
        streams=arguments.streams,
        step_ms=arguments.step_ms,
        tokens=tokens,
        tokens_per_s=round(tokens / elapsed_s, 1),
        tokens_per_message=round(tokens / messages, 2),
        idle_cpu_percent=round(100 * idle_share, 2),
        cpu_us_per_token=round(1e6 * (busy_s - idle_share * elapsed_s) / tokens, 2),
    )


def _cpu_clock(pid: int) -> Callable[[], float]:
    group = psutil.Process(pid)
    processes = [group, *group.children(recursive=True)]

    def cpu_s() -> float:
        times: list[Any] = [process.cpu_times() for process in processes]
        return float(sum(each.user + each.system for each in times))

    return cpu_s


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--processes", type=int, default=1, help="processes of the frontend")
    parser.add_argument("--step-ms", type=float, default=25.0, help="time of one step")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both")
    parser.add_argument("--stop", action="store_true", help="give each request a stop string")
    parser.add_argument("--tls", action="store_true", help="compare plain text with mutual TLS")
    parser.add_argument("--rounds", type=int, default=1, help="comparisons with TLS")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    modes = list(MODES) if arguments.mode == "both" else [arguments.mode]
    with contextlib.ExitStack() as stack:
        turns: list[Certificates | None] = [None]
        if arguments.tls:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            secured = Certificates(folder)
            turns = [None, secured, secured, None] * arguments.rounds
        runs = [
            asdict(uvloop.run(measure(arguments, mode, turn))) for mode in modes for turn in turns
        ]
    if arguments.json:
        print(json.dumps(runs))
        return
    for name in runs[0]:
        print(f"{name:24}" + "".join(f"{run[name]!s:>14}" for run in runs))
    if arguments.tls:
        for mode in modes:
            ratios = _tls_ratios([run for run in runs if run["mode"] == mode])
            listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"CPU per token with TLS over plain text, {mode}: {listed}")
            print(f"median: {statistics.median(ratios):.2f}")


def _tls_ratios(runs: list[dict[str, Any]]) -> list[float]:
    """Returns, for each round of four runs, how much more CPU a token costs with TLS."""
    costs = [run["cpu_us_per_token"] for run in runs]
    rounds = [costs[start : start + 4] for start in range(0, len(costs), 4)]
    return [(first + second) / (before + after) for before, first, second, after in rounds]


if __name__ == "__main__":
    main()
