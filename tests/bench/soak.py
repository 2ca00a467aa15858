"""Mixed load on both services for some minutes, and the resources that every process holds.

Memory, descriptors, threads, tasks and blocks are sampled; the table has the mean of the first and
of the last quarter of the samples after the warm-up. A figure that grows from one to the other
leaks, or has not reached its bound yet. The clients' load is in tests.bench.soak_load.

    python -m tests.bench.soak --minutes 30 [--json out.json]
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import psutil

from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from tests.bench.machine import commit, machine, versions
from tests.bench.rounds import rounds
from tests.bench.soak_load import Load
from tests.support.engine_client import engine_stub, get_stats
from tests.support.processes import Stack, free_port, stack

MIB = 2**20
SETTLE_S = 60.0


class Samples:
    """Samples of what processes and the engine hold, over time."""

    def __init__(self, services: Stack) -> None:
        self._services = services
        self._series: dict[str, list[float]] = defaultdict(list)

    async def take(self, stub: EngineServiceStub) -> None:
        """Takes one sample of everything."""
        stats = await get_stats(stub)
        figures = {
            "engine: tasks": stats.num_tasks,
            "engine: live requests": stats.num_running + stats.num_waiting,
            "engine: used blocks": stats.num_blocks - 1 - stats.num_free_blocks,
            "engine: sessions": stats.num_sessions,
            **await asyncio.to_thread(self._of_processes),
        }
        for name, value in figures.items():
            self._series[name].append(value)

    def _of_processes(self) -> dict[str, float]:
        """Returns memory, descriptors and threads of both services and of their children."""
        figures: dict[str, float] = {}
        roots = {"engine": self._services.engine.pid, "frontend": self._services.frontend.pid}
        for service, pid in roots.items():
            root = psutil.Process(pid)
            children = root.children(recursive=True)
            figures[f"{service}: processes"] = 1 + len(children)
            for name, group in ((service, [root]), (f"{service}'s children", children)):
                figures[f"{name}: memory, MiB"] = sum(map(_memory, group)) / MIB
                figures[f"{name}: descriptors"] = sum(map(_num_fds, group))
                figures[f"{name}: threads"] = sum(map(_num_threads, group))
        return figures

    def table(self) -> dict[str, dict[str, float]]:
        """Returns the means of the first and of the last quarter of each series."""
        table = {}
        for name, values in sorted(self._series.items()):
            quarter = max(1, len(values) // 4)
            first, last = statistics.mean(values[:quarter]), statistics.mean(values[-quarter:])
            table[name] = {"first": first, "last": last, "most": max(values)}
        return table


def _memory(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def _num_fds(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.num_fds()
    return 0


def _num_threads(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.num_threads()
    return 0


async def _client(work: Callable[[], Awaitable[str]], end_s: float, ends: Counter[str]) -> None:
    """Runs one piece of work after the other."""
    for _ in rounds(end_s):
        try:
            ends[await work()] += 1
        except grpc.aio.AioRpcError as error:
            ends[error.code().name] += 1
        except (OSError, asyncio.CancelledError) as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # in a task
                raise
            ends[type(error).__name__] += 1


async def soak(services: Stack, *, http_port: int, seconds: float, warm_up_s: float, seed: int):
    """Returns the samples, and how each kind of work ended how often."""
    rng = random.Random(seed)
    load, samples = Load(services.frontend.address, http_port, rng), Samples(services)
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    started_s = time.monotonic()
    end_s = started_s + warm_up_s + seconds
    clients = [
        asyncio.create_task(_client(work, end_s, ends[kind]))
        for kind, (work, count) in load.kinds().items()
        for _ in range(count)
    ]
    every_s = min(2.0, seconds / 16)
    async with engine_stub(services.engine.address) as stub:
        await asyncio.sleep(warm_up_s)
        for _ in rounds(end_s):
            await samples.take(stub)
            await asyncio.sleep(every_s)
        await asyncio.gather(*clients)
        idle = Samples(services)
        settled_s = time.monotonic() + SETTLE_S
        while (stats := await get_stats(stub)).num_running + stats.num_waiting:
            if time.monotonic() > settled_s:
                break
            await asyncio.sleep(0.2)
        await idle.take(stub)
    return samples.table(), {name: row["last"] for name, row in idle.table().items()}, ends


async def _run(arguments: argparse.Namespace) -> dict[str, object]:
    http_port = free_port()
    frontend = {"http_port": http_port}
    async with stack(engine={"num_kv_blocks": 600}, frontend=frontend) as services:
        table, idle, ends = await soak(
            services,
            http_port=http_port,
            seconds=60 * arguments.minutes,
            warm_up_s=arguments.warm_up_s,
            seed=arguments.seed,
        )
    return {
        "minutes": arguments.minutes,
        "held": {name: {**row, "idle": idle[name]} for name, row in table.items()},
        "ends": {kind: dict(counts) for kind, counts in ends.items()},
        "facts": {"commit": commit(), "machine": machine(), "versions": versions()},
    }


def _print(result: dict) -> None:
    columns = ("first", "last", "most", "idle")
    print(f"{'':34}" + "".join(f"{column:>10}" for column in columns) + f"{'last/first':>12}")
    for name, row in result["held"].items():
        ratio = row["last"] / row["first"] if row["first"] else 1.0
        print(f"{name:34}" + "".join(f"{row[c]:10.1f}" for c in columns) + f"{ratio:12.2f}")
    print()
    for kind, counts in result["ends"].items():
        print(f"{kind:14}" + ", ".join(f"{end} {count}" for end, count in sorted(counts.items())))


def main() -> None:
    """Runs the load and prints what was held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    result = asyncio.run(_run(arguments))
    _print(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
