"""Many engines behind many frontends, without GPUs: `python -m tests.bench.fleet`.

    python -m tests.bench.fleet --engines 2,8,32 --frontends 1,2,4 --json fleet.json

Engines are real services with a paced stand-in for the worker, all in one process but the last,
which is killed in the middle of a second run. Frontends are real processes. Conversations share the
beginnings of their prompts in groups; each turn goes to any frontend with the whole conversation.
One engine with the cache of all of them comes first: no fleet can find more prefixes.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import grpc
import structlog
import uvloop

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1 import engine_pb2
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.engine.checkpoint.tokenizer_files import TokenizerFile, TokenizerFiles
from services.engine.server import EngineServer
from services.frontend.engine_client.tokenizer_files import tokenizer_sha256
from tests.bench.engine_grpc import PacedExecutor
from tests.bench.machine import cpu_s
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.engine_harness import engine_config, model_folder
from tests.support.processes import start_frontend

MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
SHARED_TOKENS = 128
"""Length of the beginning that a group's conversations share."""
TURN_TOKENS = 48
"""New tokens of the user in a turn."""
OUTPUT_TOKENS = 16
MAX_NUM_SEQS = 32
LOSS = "repeat each run with an engine that is killed in the middle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The conversations of one engine's share, and their order."""

    groups: int
    conversations: int
    turns: int
    streams: int
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Results of a run. Rates are of prompt tokens; spread is largest over mean."""

    hit_rate: float
    load_spread: float
    frontend_us_per_token: float
    num_errors: int


def serve_engines(
    num_engines: int,
    num_blocks: int,
    num_seqs: int,
    step_s: float,
    heartbeat_ms: int,
    to: Connection,
) -> None:
    """Runs engines; a child process. Sends their addresses."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    files = tokenizer_files()
    tokenizer = TokenizerFiles(
        tuple(TokenizerFile(name, content) for name, content in sorted(files.items())),
        tokenizer_sha256(files),
    )
    config = engine_config(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_waiting=4096,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=num_blocks,
        heartbeat_interval_ms=heartbeat_ms,
    )

    async def run() -> None:
        model = model_folder(max_model_len=MAX_MODEL_LEN, vocab_size=512, tokenizer=tokenizer)
        servers = [
            EngineServer(config, model, lambda: PacedExecutor(step_s, num_blocks))
            for _ in range(num_engines)
        ]
        to.send([f"127.0.0.1:{await server.start()}" for server in servers])
        await asyncio.gather(*(server.wait() for server in servers))

    uvloop.run(run())


@contextlib.contextmanager
def engines(*arguments: float) -> Iterator[tuple[list[str], BaseProcess]]:
    """Starts a process with engines; yields their addresses and the process."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=serve_engines, args=(*arguments, sending), daemon=True)
    process.start()
    try:
        yield receiving.recv(), process
    finally:
        process.kill()
        process.join()


class Client:
    """Holds conversations with frontends."""

    def __init__(self, frontends: Sequence[FrontendServiceStub], load: Load, seed: int) -> None:
        self._frontends = frontends
        self._load = load
        self._random = random.Random(seed)
        self._streams = asyncio.Semaphore(load.streams)
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.num_errors = 0

    async def run(self) -> None:
        """Holds all conversations, as many at a time as there are streams."""
        groups = [self._tokens(SHARED_TOKENS) for _ in range(self._load.groups)]
        beginnings = [groups[n % len(groups)] for n in range(self._load.conversations)]
        self._random.shuffle(beginnings)
        await asyncio.gather(*map(self._converse, beginnings))

    async def _converse(self, beginning: list[int]) -> None:
        tokens = list(beginning)
        async with self._streams:
            for _ in range(self._load.turns):
                await asyncio.sleep(self._random.expovariate(1 / self._load.pause_s))
                tokens += self._tokens(TURN_TOKENS)
                tokens += await self._answer(tokens)

    async def _answer(self, tokens: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=tokens), options=pb.GenerationOptions(sampling=sampling)
        )
        answer: list[int] = []
        try:
            async for response in self._random.choice(self._frontends).Generate(request):
                answer += response.output.token_ids
                if response.output.finish_reason:
                    usage = response.output.usage
                    self.prompt_tokens += usage.prompt_tokens
                    self.cached_tokens += usage.cached_tokens
                    self.output_tokens += usage.output_tokens
        except grpc.aio.AioRpcError:
            self.num_errors += 1
        return answer

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(32, 120) for _ in range(count)]


async def computed_tokens(address: str) -> int:
    """Returns the prompt and output tokens that an engine has computed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stats = await EngineServiceStub(channel).GetStats(engine_pb2.GetStatsRequest())
    return int(stats.prompt_tokens - stats.cached_tokens + stats.output_tokens)


@contextlib.asynccontextmanager
async def frontends(
    addresses: Sequence[str], count: int
) -> AsyncIterator[tuple[list[FrontendServiceStub], list[int]]]:
    """Starts frontends of all engines; yields their stubs and process ids."""
    async with contextlib.AsyncExitStack() as exits:
        stubs, pids = [], []
        for _ in range(count):
            process = await exits.enter_async_context(start_frontend(",".join(addresses)))
            pids.append(process.pid)
            channel = await exits.enter_async_context(grpc.aio.insecure_channel(process.address))
            stubs.append(FrontendServiceStub(channel))
        for stub in stubs:
            listing = await stub.ListEngines(pb.ListEnginesRequest())
            while sum(card.ready for card in listing.engines) < len(addresses):
                await asyncio.sleep(0.05)
                listing = await stub.ListEngines(pb.ListEnginesRequest())
        yield stubs, pids


async def measure(
    num_engines: int,
    num_frontends: int,
    arguments: argparse.Namespace,
    *,
    size: int = 1,
    is_one_lost: bool = False,
) -> Figures:
    """Runs the conversations of a fleet; `size` engines' caches make one."""
    load = Load(
        groups=max(1, arguments.groups * num_engines * size),
        conversations=arguments.conversations * num_engines * size,
        turns=arguments.turns,
        streams=arguments.streams * num_engines * size,
        pause_s=arguments.pause_s,
    )
    settings = (
        arguments.num_blocks * size,
        MAX_NUM_SEQS * size,
        arguments.step_ms / 1000,
        arguments.heartbeat_ms,
    )
    with contextlib.ExitStack() as exits:
        parts = [exits.enter_context(engines(1, *settings))]
        if num_engines > 1:
            parts.append(exits.enter_context(engines(num_engines - 1, *settings)))
        addresses = [address for part, _ in parts for address in part]
        async with frontends(addresses, num_frontends) as (stubs, pids):
            client = Client(stubs, load, arguments.seed)
            before_s = sum(map(cpu_s, pids))
            run = asyncio.create_task(client.run())
            if is_one_lost:
                total = load.conversations * load.turns * OUTPUT_TOKENS
                while client.output_tokens < total / 2:  # noqa: ASYNC110  a count has no event
                    await asyncio.sleep(0.02)
                parts[0][1].kill()
                addresses.remove(parts[0][0][0])
            await run
            spent_s = sum(map(cpu_s, pids)) - before_s
            loads = [await computed_tokens(address) for address in addresses]
    return Figures(
        hit_rate=client.cached_tokens / max(client.prompt_tokens, 1),
        load_spread=max(loads) * len(loads) / max(sum(loads), 1),
        frontend_us_per_token=1e6 * spent_s / max(client.output_tokens, 1),
        num_errors=client.num_errors,
    )


def parse() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = {"type": lambda text: [int(each) for each in text.split(",")]}
    parser.add_argument("--engines", default=[2, 8, 32], help="numbers of engines", **numbers)
    parser.add_argument("--frontends", default=[1, 2], help="numbers of frontends", **numbers)
    parser.add_argument(
        "--groups", type=int, default=1, help="for each engine; 0: one group in all"
    )
    parser.add_argument("--conversations", type=int, default=16, help="for each engine")
    parser.add_argument("--turns", type=int, default=5, help="of each conversation")
    parser.add_argument("--streams", type=int, default=4, help="at a time, for each engine")
    parser.add_argument("--pause-s", type=float, default=1.0, help="mean pause before a turn")
    parser.add_argument("--num-blocks", type=int, default=512, help="of each engine")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of one step")
    parser.add_argument("--heartbeat-ms", type=int, default=100, help="of each engine")
    parser.add_argument("--loss", action=argparse.BooleanOptionalAction, default=True, help=LOSS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    """Measures and prints."""
    arguments = parse()
    rows: list[dict[str, object]] = []
    print(
        "| engines | frontends | hit rate | of one engine's | load spread | us per token | errors |"
    )
    print("|---|---|---|---|---|---|---|")
    for num_engines in arguments.engines:
        whole = uvloop.run(measure(1, 1, arguments, size=num_engines))
        for num_frontends in arguments.frontends:
            for is_one_lost in (False, True) if arguments.loss else (False,):
                figures = uvloop.run(
                    measure(num_engines, num_frontends, arguments, is_one_lost=is_one_lost)
                )
                share = figures.hit_rate / max(whole.hit_rate, 1e-9)
                lost = " - 1" if is_one_lost else ""
                print(
                    f"| {num_engines}{lost} | {num_frontends} | {figures.hit_rate:.3f} | "
                    f"{share:.3f} | {figures.load_spread:.2f} | "
                    f"{figures.frontend_us_per_token:.0f} | {figures.num_errors} |",
                    flush=True,
                )
                rows.append(
                    {
                        "engines": num_engines,
                        "frontends": num_frontends,
                        "is_one_lost": is_one_lost,
                        "hit_rate": figures.hit_rate,
                        "hit_rate_of_one_engine": whole.hit_rate,
                        "load_spread": figures.load_spread,
                        "frontend_us_per_token": figures.frontend_us_per_token,
                        "num_errors": figures.num_errors,
                    }
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
