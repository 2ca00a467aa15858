"""Memory and latency of both services under floods: `python -m tests.bench.floods`.

Both services run as processes with their default flags, the embedded model, and API keys at the
frontend. Each attack of `flood_attacks` runs for --seconds against each service, from a process of
its own, --rounds times. After each round and a rest the table has each service's memory; "most" is
its highest during the attack. Meanwhile an honest client sends short requests to the frontend, over
a connection that it keeps and over new ones: the table has the 99th percentile and the maximum of
their latency, and how many failed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grpc
import psutil

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.engine.config.grammar import GrammarConfig
from services.frontend.config import FrontendConfig
from tests.bench import machine
from tests.bench.flood_attacks import ATTACKS, LEFTOVERS, LIMITED_KEY, UNLIMITED_KEY, flood
from tests.support.processes import Stack, stack

MIB = 2**20
HONEST_KEY = "honest-0123456789"
KEYS = f"""
[keys.honest]
key = "{HONEST_KEY}"
[keys.limited]
key = "{LIMITED_KEY}"
tokens_per_minute = 1
max_live_requests = 1
[keys.unlimited]
key = "{UNLIMITED_KEY}"
"""
REQUEST = pb.GenerateRequest(
    text="Hello",
    options=pb.GenerationOptions(
        sampling=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    ),
)
PAUSE_S = 0.1
TIMEOUT_S = 60.0


class HonestClient:
    """Sends short requests until cancelled."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.latencies_s: list[float] = []
        self.lost: Counter[str] = Counter()

    async def run(self) -> None:
        """Sends over a connection that is kept, and over new ones, one request at a time each."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_connection())
            group.create_task(self._reconnect())

    async def _keep_connection(self) -> None:
        async with self._channel() as channel:
            while True:
                await self._request(channel)

    async def _reconnect(self) -> None:
        while True:
            async with self._channel() as channel:
                await self._request(channel)

    def _channel(self) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(self._address, options=options)

    async def _request(self, channel: grpc.aio.Channel) -> None:
        started_s = time.perf_counter()
        metadata = [("authorization", f"Bearer {HONEST_KEY}")]
        try:
            async for _ in FrontendServiceStub(channel).Generate(
                REQUEST, metadata=metadata, timeout=TIMEOUT_S
            ):
                pass
        except grpc.aio.AioRpcError as error:
            self.lost[f"{error.code().name}: {error.details()}"] += 1
        self.latencies_s.append(time.perf_counter() - started_s)
        await asyncio.sleep(PAUSE_S)


class Memory:
    """Resident memory of both services."""

    def __init__(self, services: Stack) -> None:
        pids = {"frontend": services.frontend.pid, "engine": services.engine.pid}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.most: dict[str, int] = {}

    def now(self) -> dict[str, int]:
        """Returns the memory of each service, in MiB."""
        return {name: process.memory_info().rss // MIB for name, process in self._processes.items()}

    async def watch(self) -> None:
        """Notes the highest values until cancelled."""
        while True:
            for name, mib in self.now().items():
                self.most[name] = max(self.most.get(name, 0), mib)
            await asyncio.sleep(0.2)


async def _round(
    attack: str, services: Stack, targets: list[str], pool: ProcessPoolExecutor, times: Any
) -> dict[str, Any]:
    """Runs one attack once against all targets at the same time."""
    honest, memory = HonestClient(services.frontend.address), Memory(services)
    tasks = [asyncio.create_task(honest.run()), asyncio.create_task(memory.watch())]
    loop = asyncio.get_running_loop()
    sent = await asyncio.gather(
        *(
            loop.run_in_executor(
                pool, flood, attack, name, getattr(services, name).address, times.seconds
            )
            for name in targets
        )
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    latencies_s = honest.latencies_s or [float("inf")]
    result = {
        "attack": attack,
        "sent": dict(zip(targets, sent, strict=True)),
        "requests": len(honest.latencies_s),
        "lost": dict(honest.lost),
        "median_s": round(statistics.median(latencies_s), 3),
        "p99_s": round(sorted(latencies_s)[int(0.99 * len(latencies_s))], 3),
        "max_s": round(max(latencies_s), 3),
        "most_mib": memory.most,
        "load": round(os.getloadavg()[0], 1),
    }
    await asyncio.sleep(times.rest_s)
    return result | {"after_mib": memory.now()}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all attacks, each `rounds` times in turn."""
    frontend, engine = FrontendConfig.model_fields, GrammarConfig.model_fields
    # Elsewhere tests set these higher, for machines that hold a process up.
    silence, template, grammar = (
        frontend["engine_silence_timeout_s"].default,
        frontend["template_timeout_s"].default,
        engine["grammar_timeout_s"].default,
    )
    attacks = arguments.attack or list(ATTACKS)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as resources:
        keys = Path(resources.enter_context(tempfile.TemporaryDirectory())) / "keys.toml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        services = resources.enter_context(
            stack(
                engine={"grammar_timeout_s": grammar},
                frontend={
                    "api_keys_file": keys,
                    "engine_silence_timeout_s": silence,
                    "template_timeout_s": template,
                },
            )
        )
        pool = resources.enter_context(ProcessPoolExecutor(2, mp_context=get_context("spawn")))
        await asyncio.to_thread(services.frontend.wait_ready)
        started = Memory(services).now()
        for attack in attacks:
            for _ in range(arguments.rounds):
                row = await _round(attack, services, arguments.target, pool, arguments)
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
        if arguments.log:
            for name in ("frontend", "engine"):
                arguments.log.mkdir(exist_ok=True)
                (arguments.log / f"{name}.log").write_text(getattr(services, name).log)
    facts = {"commit": machine.commit(), "machine": machine.machine(), **machine.versions()}
    return {"seconds": arguments.seconds, "started_mib": started, "rows": rows, "facts": facts}


def _print(result: dict[str, Any]) -> None:
    print(f"memory before, MiB: {result['started_mib']}\n")
    heads = ("frontend, MiB", "most", "engine, MiB", "most", "p50, s", "p99", "max", "lost")
    print(f"{'attack':30} " + " ".join(f"{head:>15}" for head in heads) + f"{'load':>6}")
    for attack in dict.fromkeys(row["attack"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["attack"] == attack]
        cells = []
        for name in ("frontend", "engine"):
            cells.append(", ".join(str(row["after_mib"][name]) for row in rows))
            cells.append(str(max(row["most_mib"][name] for row in rows)))
        for figure in ("median_s", "p99_s", "max_s"):
            cells.append(str(max(row[figure] for row in rows)))
        lost = sum(sum(row["lost"].values()) for row in rows)
        cells.append(f"{lost} of {sum(row['requests'] for row in rows)}")
        load = max(row["load"] for row in rows)
        print(f"{attack:30} " + " ".join(f"{cell:>15}" for cell in cells) + f"{load:>6}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--attack", action="append", choices=[*ATTACKS, *LEFTOVERS], help="absent: all but the last"
    )
    parser.add_argument(
        "--target", nargs="+", choices=["frontend", "engine"], default=["frontend", "engine"]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a round")
    parser.add_argument("--rest-s", type=float, default=15.0, help="rest after a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", type=Path, help="copy the services' logs into this folder")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments))
    _print(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
