"""The serving workload over gRPC and without: `python -m tests.bench.serving`.

    python -m tests.bench.serving --shape qwen3-8b --out serving.json [engine flags]

Three paths, the same requests, all submitted at once: `offline` (EngineCore and worker, no gRPC),
`engine` (token ids over the engine's sessions) and `services` (token ids to the frontend, text and
token ids back, over its sessions). The services are the real processes; several client processes
drive them, and the CPU of each is in the result: a client or service near 100 % is the bottleneck.
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import grpc
import uvloop

from protos.engine.v1.engine_pb2 import GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.rank_process import WorkerDiedError
from tests.bench.figures import add_serving_figures
from tests.bench.machine import children, cpu_s
from tests.bench.offline_engine import EngineFailedError, offline_engine
from tests.bench.program import print_report, reported
from tests.bench.report import Report
from tests.bench.serving_client import PATHS, Outcome, run_client
from tests.bench.settings import Settings, list_of, make_parser
from tests.bench.workload import Job, fitted, serving_jobs
from tests.support.processes import ServiceFailedError, ServiceProcess

OFFLINE = "offline"
SYNC_S = 0.1
"""From the signal to begin until the clients begin."""
WARM_UP_TIMEOUT_S = 120
GRACE_S = 30
"""Time beyond the budget that what has begun may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of the workload over one path; CPU in shares of a core."""

    elapsed_s: float
    ttft_s: float
    messages_per_s: float
    cpu: dict[str, float]


class Clients:
    """Client processes of one path; each has a share of the requests."""

    def __init__(self, path: str, address: str, jobs: Sequence[Job], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._num_tokens = sum(job.num_output for job in jobs)
        self._ports: list[Connection] = []
        self._processes = []
        for index in range(min(count, len(jobs))):
            ours, theirs = context.Pipe()
            share = list(jobs[index::count])
            process = context.Process(
                target=run_client, args=(path, address, share, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ports.append(ours)
            self._processes.append(process)

    def run(self, cpu_clocks: dict[str, Callable[[], float]], timeout_s: float) -> Round:
        """Runs the workload once.

        Raises:
            EngineFailedError: a request failed, not every token came, or not in time.
        """
        self._send(True)
        _check(answer for answer in self._receive(timeout_s) if isinstance(answer, Outcome))
        before = {name: clock() for name, clock in cpu_clocks.items()}
        begin_s = time.monotonic() + SYNC_S
        self._send(begin_s)
        outcomes: list[Outcome] = self._receive(timeout_s)
        after = {name: clock() for name, clock in cpu_clocks.items()}
        _check(outcomes)
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        if num_tokens != self._num_tokens:
            raise EngineFailedError(f"{num_tokens} tokens came instead of {self._num_tokens}")
        elapsed_s = max(outcome.ended_s for outcome in outcomes) - begin_s
        cpu = {name: (after[name] - before[name]) / elapsed_s for name in cpu_clocks}
        cpu["busiest client"] = max(outcome.cpu_s for outcome in outcomes) / elapsed_s
        return Round(
            elapsed_s=elapsed_s,
            ttft_s=median(value for outcome in outcomes for value in outcome.ttft_s),
            messages_per_s=sum(outcome.num_messages for outcome in outcomes) / elapsed_s,
            cpu={name: round(share, 3) for name, share in cpu.items()},
        )

    def stop(self) -> None:
        """Ends the processes."""
        for process, port in zip(self._processes, self._ports, strict=True):
            port.close()
            process.terminate()
            process.join()

    def _receive(self, timeout_s: float) -> list:
        """Returns what each process says next."""
        end_s = time.monotonic() + timeout_s
        answers = []
        for port in self._ports:
            if not port.poll(max(0.0, end_s - time.monotonic())):
                raise EngineFailedError(f"a client did not answer within {timeout_s:.0f} s")
            try:
                answers.append(port.recv())
            except EOFError:
                raise EngineFailedError("a client process died") from None
        return answers

    def _send(self, value: object) -> None:
        for port in self._ports:
            port.send(value)


def _check(outcomes: Iterable[Outcome]) -> None:
    """Raises EngineFailedError if a client met an error."""
    for outcome in outcomes:
        if outcome.error:
            raise EngineFailedError(outcome.error)


async def measure_offline(settings: Settings, jobs: list[Job], report: Report) -> None:
    """Measures and reports the workload on an engine without gRPC."""
    elapsed_s: list[float] = []
    async with (
        asyncio.timeout(settings.budget.left_s + GRACE_S),
        offline_engine(settings.config) as engine,
    ):
        await engine.generate(jobs[:8])
        await engine.wait_until_captured()
        while not elapsed_s or (
            len(elapsed_s) < settings.arguments.repeats and settings.budget.left_s
        ):
            elapsed_s.append((await engine.generate(jobs)).elapsed_s)
            report.note(f"{OFFLINE}: {elapsed_s[-1]:.2f} s")
    add_serving_figures(report, f"serving, {OFFLINE}", jobs, elapsed_s)


@contextmanager
def running_services(
    config: EngineConfig, ready_timeout_s: float, *, frontend_processes: int = 1
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Starts engine and frontend with this configuration; yields both, ready.

    Raises:
        ServiceFailedError: one did not start.
    """
    sections = json.loads(config.model_dump_json(exclude_defaults=True))
    flags = {
        name: value if isinstance(value, str | int | float) else json.dumps(value)
        for section in sections.values()
        for name, value in section.items()
        if name != "port"
    }
    engine = ServiceProcess("services.engine", flags, ready_timeout_s=ready_timeout_s)
    frontend_flags = {
        "engine_address": engine.address,
        "log_level": "warning",
        "processes": frontend_processes,
    }
    with engine, ServiceProcess("services.frontend", frontend_flags) as frontend:
        yield engine, frontend


async def wait_until_captured(address: str) -> None:
    """Returns when an engine service has no planned graph left to capture."""

    async with grpc.aio.insecure_channel(address) as channel:
        stub = EngineServiceStub(channel)
        while True:
            stats = await stub.GetStats(GetStatsRequest())
            if len(stats.graphs) >= stats.num_graphs_planned:
                return
            await asyncio.sleep(0.1)


def measure_services(settings: Settings, report: Report, jobs: list[Job]) -> None:
    """Measures the paths over gRPC, in turns, and reports them."""
    arguments = settings.arguments
    paths = [path for path in arguments.paths if path != OFFLINE]
    with running_services(
        settings.config,
        settings.budget.left_s,
        frontend_processes=arguments.frontend_processes,
    ) as (engine, frontend):
        report.note("both services are ready")
        asyncio.run(wait_until_captured(engine.address))
        pids = {
            "engine": [engine.pid],
            "frontend": [frontend.pid, *children(frontend.pid)],
            "worker": children(engine.pid)[:1],
        }
        clocks = {name: lambda pids=pids: sum(map(cpu_s, pids)) for name, pids in pids.items()}
        addresses = {"engine": engine.address, "services": frontend.address}
        clients = {path: Clients(path, addresses[path], jobs, arguments.clients) for path in paths}
        rounds: dict[str, list[Round]] = {path: [] for path in paths}
        try:
            for path in paths:
                warm_up(path, addresses[path], jobs[:8])
            for number in range(arguments.repeats):
                for path in paths:
                    if number and not settings.budget.left_s:
                        continue
                    rounds[path].append(clients[path].run(clocks, settings.budget.left_s + GRACE_S))
                    report.note(f"{path}: {rounds[path][-1].elapsed_s:.2f} s")
        finally:
            for each in clients.values():
                each.stop()
    for path in paths:
        add_path(report, path, jobs, rounds[path])


def warm_up(path: str, address: str, jobs: Sequence[Job]) -> None:
    """Runs a few requests over a path, so that no round builds kernels or connections."""
    clients = Clients(path, address, jobs, 1)
    try:
        clients.run({}, WARM_UP_TIMEOUT_S)
    finally:
        clients.stop()


def add_path(report: Report, path: str, jobs: list[Job], rounds: list[Round]) -> None:
    """Reports one path over gRPC."""
    add_serving_figures(report, f"serving, {path}", jobs, [each.elapsed_s for each in rounds])
    ttft_ms = [each.ttft_s * 1000 for each in rounds]
    report.add(f"serving, {path}, first token p50", ttft_ms, "ms")
    facts = {
        "cpu_share": [each.cpu for each in rounds],
        "messages_per_s": [round(each.messages_per_s) for each in rounds],
    }
    report.state(path, facts)


def add_ratios(report: Report, offline: Path | None) -> None:
    """Reports throughput over gRPC as shares of the throughput offline, of this run or a file."""
    name = f"serving, {OFFLINE}"
    if offline is not None:
        base = json.loads(offline.read_text())["figures"].get("serving")
    else:
        base = report.figures.get(name)
    if base is None:
        report.problem("ratios: there is no offline figure")
        return
    for path in PATHS:
        figure = report.figures.get(f"serving, {path}")
        if figure is not None:
            shares = [base["median"] / value for value in figure["values"]]
            report.add(f"throughput, {path} / offline", shares, "ratio", better="higher")


def run(settings: Settings, report: Report) -> None:
    """Measures every path; what failed is in the report."""
    arguments = settings.arguments
    jobs = fitted(
        serving_jobs(arguments.requests),
        vocab_size=settings.model.vocab_size,
        max_model_len=settings.max_model_len,
        divide_by=arguments.divide_by,
    )
    try:
        if OFFLINE in arguments.paths:
            uvloop.run(measure_offline(settings, jobs, report))
        if set(arguments.paths) & set(PATHS):
            measure_services(settings, report, jobs)
            add_ratios(report, arguments.offline)
    except TimeoutError:
        report.problem("the rest: out of time")
    except (WorkerDiedError, EngineFailedError, ServiceFailedError) as error:
        report.problem(str(error))


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    paths = [OFFLINE, *PATHS]
    parser.add_argument("--paths", type=list_of(*paths), default=paths, help="what to measure")
    parser.add_argument(
        "--offline", type=Path, help="offline figures: a file of tests.bench.offline"
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6, help="client processes")
    parser.add_argument("--frontend-processes", type=int, default=1)
    parser.add_argument("--divide-by", type=int, default=1, help="make all lengths shorter")
    return parser


def main() -> None:
    """Measures and prints."""
    # The services have sessions of their own: an end by `timeout` must stop them, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with reported("serving", own_parser()) as (settings, report):
        run(settings, report)
    print_report(report)
    raise SystemExit(0 if report.figures else 1)


if __name__ == "__main__":
    main()
