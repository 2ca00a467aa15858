"""Kills a rank of an engine again and again, and checks that every client's tokens go on.

    python -m tests.bench.rank_soak --seconds 300 --kill-every-s 30 [--json out.json] [engine flags]

Clients stream greedy outputs over both services. Each output is compared with the one that the
prompt had before the first kill: all of its tokens must come, once and in order. An outage is the
longest time without a token of any client after a kill. Resources of both services are counted
before the first kill and after the last, without requests, and once more when both have ended.
Other programs may run beside it; the memory of GPUs and the names of files are theirs, too.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import grpc
import psutil

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.engine.v1.worker_pb2 import RankInfo
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.bench.machine import commit, gpus_used_mib, machine, versions
from tests.bench.model_folder import make_model_folder, shape_names
from tests.bench.workload import fixed_jobs
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import processes_of
from tests.support.processes import ServiceProcess, Stack, start_engine, start_frontend

NUM_PROMPTS = 16
CALL_TIMEOUT_S = 240.0
SETTLE_S = 30.0
RANDOM_SHARE = 0.25
"""A kill comes at a random moment of the last quarter of a period."""
MARK = "RANK_SOAK"
"""Variable in the environment of all processes of the services, those without a parent too."""
SMALL: dict[str, object] = {
    "tensor_parallel_size": 2,
    "batch_invariant": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "fail_on_late_build": False,
}
"""Flags of the engine that others override; outputs must not depend on what else a step has."""


@dataclass
class Tally:
    """Outcomes of requests, and when tokens came.

    ends: of requests: equal, different, or the code of the error that refused them or, after a
        first token, lost them.
    missing, surplus: tokens of outputs that ended too early, or too late.
    token_times_s: of messages with tokens, of all clients; time.monotonic().
    """

    ends: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    surplus: int = 0
    num_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)

    def compare(self, tokens: list[int], expected: list[int]) -> None:
        """Counts an output that ended by itself."""
        self.ends["equal" if tokens == expected else "different"] += 1
        self.missing += max(0, len(expected) - len(tokens))
        self.surplus += max(0, len(tokens) - len(expected))
        self.num_tokens += len(tokens)

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Returns the longest time without tokens between two moments."""
        times = [begin_s, *(at for at in self.token_times_s if begin_s < at < end_s), end_s]
        return max(after - before for before, after in pairwise(times))


@dataclass(frozen=True)
class Kill:
    """When a rank was killed, and its process."""

    at_s: float
    rank: int
    pid: int


@dataclass(frozen=True)
class Job:
    """A prompt and its greedy output."""

    prompt: list[int]
    expected: list[int]


async def generate(
    stub: FrontendServiceStub, prompt: list[int], num_tokens: int, tally: Tally, tokens: list[int]
) -> list[int]:
    """Returns the tokens of a greedy output, which `tokens` gets as they come."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(
        options=pb.GenerationOptions(sampling=sampling), tokens=pb.TokenIds(ids=prompt)
    )
    async for response in stub.Generate(request, timeout=CALL_TIMEOUT_S):
        tokens += response.output.token_ids
        tally.token_times_s.append(time.monotonic())
    return tokens


async def client(stub: FrontendServiceStub, jobs: list[Job], end_s: float, tally: Tally) -> None:
    """Sends one request after the other, of random prompts and lengths.

    Ends at a time, once any client has had an output.
    """
    while time.monotonic() < end_s or not tally.num_tokens:
        job = random.choice(jobs)
        num_tokens = random.randint(1, len(job.expected))
        tokens: list[int] = []
        try:
            await generate(stub, job.prompt, num_tokens, tally, tokens)
        except grpc.aio.AioRpcError as error:
            # An engine that starts again takes no new requests.
            tally.ends[f"{'lost' if tokens else 'refused'}: {error.code().name}"] += 1
            await asyncio.sleep(0.2)
        else:
            tally.compare(tokens, job.expected[:num_tokens])


async def kill_ranks(stub: EngineServiceStub, every_s: float, num_periods: int) -> list[Kill]:
    """Kills a random rank in each period, and returns when the engine has got over the last."""
    kills: list[Kill] = []
    for _ in range(num_periods):
        pause_s = random.uniform(1 - RANDOM_SHARE, 1) * every_s
        await asyncio.sleep(pause_s)
        ranks = (await get_stats(stub)).ranks
        if not are_there(ranks, kills):
            print("no rank was killed: the engine starts", flush=True)
        else:
            chosen = random.choice(ranks)
            os.kill(chosen.pid, signal.SIGKILL)
            kills.append(Kill(time.monotonic(), chosen.rank, chosen.pid))
            print(f"killed rank {chosen.rank}, process {chosen.pid}", flush=True)
        await asyncio.sleep(every_s - pause_s)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while not are_there((await get_stats(stub)).ranks, kills):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.2)
    return kills


def are_there(ranks: Sequence[RankInfo], kills: list[Kill]) -> bool:
    """Whether all ranks live; a restart that still goes on shows the ranks before it."""
    gone = {kill.pid for kill in kills}
    live = [each for each in ranks if each.pid not in gone and psutil.pid_exists(each.pid)]
    return 0 < len(live) == len(ranks)


async def held(services: Stack, stub: EngineServiceStub) -> dict[str, float]:
    """Returns what idle services hold; waits until no request is left."""
    settled_s = time.monotonic() + SETTLE_S
    while (stats := await get_stats(stub)).num_running + stats.num_waiting:
        if time.monotonic() > settled_s:
            break
        await asyncio.sleep(0.2)
    figures: dict[str, float] = {
        "live requests": stats.num_running + stats.num_waiting,
        "used blocks": stats.num_blocks - 1 - stats.num_free_blocks,
        "tasks": stats.num_tasks,
    }
    for name, service in (("engine", services.engine), ("frontend", services.frontend)):
        root = psutil.Process(service.pid)
        children = root.children(recursive=True)
        figures[f"{name}: descriptors"] = root.num_fds()
        figures[f"{name}: child processes"] = len(children)
        figures[f"{name}: their descriptors"] = sum(each.num_fds() for each in children)
        figures[f"{name}: memory, MiB"] = root.memory_info().rss / 2**20
    marked = marked_processes()
    figures["all: processes"] = len(marked)
    figures["all: listening ports"] = sum(map(_num_listening, marked))
    figures |= {f"GPU {gpu}: MiB": used for gpu, used in enumerate(gpus_used_mib())}
    return figures


def marked_processes() -> list[psutil.Process]:
    """Returns the live processes of the services, and of services before them in this program."""
    found = []
    for process in processes_of(psutil.pids()):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is another user's
            if process.environ().get(MARK) == os.environ[MARK] and process.pid != os.getpid():
                found.append(process)
    return found


def _num_listening(process: psutil.Process) -> int:
    try:
        return sum(each.status == psutil.CONN_LISTEN for each in process.net_connections("inet"))
    except psutil.NoSuchProcess:
        return 0


def shared_files() -> set[str]:
    """Returns what outlives processes: shared memory, and folders with the ranks' sockets."""
    folders = Path(gettempdir()).glob("octavo-*")
    return {str(path) for path in (*Path("/dev/shm").iterdir(), *folders)}


async def soak(services: Stack, arguments: argparse.Namespace, vocab_size: int) -> dict:
    """Returns what came of requests, kills and resources."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        engine_stub(services.engine.address) as engine,
        grpc.aio.insecure_channel(services.frontend.address, options=options) as channel,
    ):
        stub = FrontendServiceStub(channel)
        drawn = fixed_jobs(NUM_PROMPTS, 100, arguments.tokens)
        prompts = [
            [token % vocab_size for token in job.prompt[: 7 * (number + 1)]]
            for number, job in enumerate(drawn)
        ]
        outputs = await asyncio.gather(
            *(generate(stub, prompt, arguments.tokens, Tally(), []) for prompt in prompts)
        )
        jobs = [Job(*each) for each in zip(prompts, outputs, strict=True)]
        before = await held(services, engine)
        num_restarts = (await get_stats(engine)).num_worker_restarts
        tally, end_s = Tally(), time.monotonic() + arguments.seconds
        # Clients go on for some time after the last kill.
        num_periods = math.ceil(arguments.seconds / arguments.kill_every_s) - 1
        *_, kills = await asyncio.gather(
            *(client(stub, jobs, end_s, tally) for _ in range(arguments.clients)),
            kill_ranks(engine, arguments.kill_every_s, num_periods),
        )
        after, stats = await held(services, engine), await get_stats(engine)
    ends_s = [kill.at_s for kill in kills[1:]] + [end_s]
    outages = [
        tally.longest_gap_s(kill.at_s, max(kill.at_s, until_s))
        for kill, until_s in zip(kills, ends_s, strict=False)
    ]
    return {
        "ends": dict(tally.ends),
        "tokens": {
            "received": tally.num_tokens, "missing": tally.missing, "surplus": tally.surplus,
        },
        "kills": Counter(f"rank {kill.rank}" for kill in kills),
        "restarts": stats.num_worker_restarts - num_restarts,
        "outages_s": [round(each, 2) for each in outages],
        "held": {name: [before[name], after[name]] for name in before},
    }  # fmt: skip


async def run(arguments: argparse.Namespace, engine_flags: list[str], folder: Path) -> dict:
    """Starts both services, with the engine's flags as they are, and stops them."""
    model = make_model_folder(arguments.shape, folder)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    flags = SMALL | {"model": model, "load_format": "dummy"} | flags_of(engine_flags)
    os.environ[MARK] = str(os.getpid())
    files = shared_files()
    engine = start_engine(**flags)
    services = Stack(engine, start_frontend(engine.address))
    async with services:
        result = await soak(services, arguments, vocab_size) | {"log": fault_lines(engine)}
    psutil.wait_procs(marked_processes(), timeout=SETTLE_S)
    left = {
        "processes": [" ".join(each.cmdline()[:4]) for each in marked_processes()],
        "files": sorted(shared_files() - files),
    }
    return result | {"left": left}


def flags_of(arguments: list[str]) -> dict[str, str | bool]:
    """Returns the engine's flags of a command line by their names; a flag alone is a switch."""
    flags: dict[str, str | bool] = {}
    name = ""
    for each in arguments:
        if not each.startswith("--"):
            flags[name] = each
            continue
        name = each.removeprefix("--").replace("-", "_")
        flags[name.removeprefix("no_")] = not name.startswith("no_")
    return flags


def fault_lines(engine: ServiceProcess) -> dict[str, int]:
    """Counts the engine's log lines by event and level, without those of information."""
    counts: Counter[str] = Counter()
    for line in engine.log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            counts["not JSON"] += 1
            continue
        if entry.get("level") not in ("info", "debug"):
            counts[f"{entry.get('level')}: {entry.get('event')}"] += 1
    return dict(counts)


def show(result: dict) -> None:
    """Prints the figures, a line for each kind."""
    outages = result["outages_s"]
    for name in ("ends", "tokens", "kills", "restarts", "log"):
        print(f"{name}: {result[name]}")
    print(f"left after the end: {result['left']}")
    if outages:
        print(f"outages, s: median {statistics.median(outages):.2f}, most {max(outages):.2f}: "
              f"{outages}")  # fmt: skip
    print("held before and after:")
    for held_by, figures in groupby(result["held"].items(), lambda row: row[0].partition(":")[0]):
        print("  " + ", ".join(
            f"{name.removeprefix(held_by)} {before:g} {after:g}".strip(": ")
            for name, (before, after) in figures
        ), f"({held_by})")  # fmt: skip


def main() -> None:
    """Runs the load and the kills, and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kill-every-s", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=400, help="of the longest output")
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-0.6b")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments, engine_flags = parser.parse_known_args()
    with TemporaryDirectory(prefix="octavo-soak-") as folder:
        result = asyncio.run(run(arguments, engine_flags, Path(folder)))
    show(result)
    if arguments.json:
        facts = {"commit": commit(), "machine": machine(), "versions": versions()}
        settings = {"seconds": arguments.seconds, "engine_flags": engine_flags}
        arguments.json.write_text(json.dumps(settings | result | facts, indent=1))


if __name__ == "__main__":
    main()
