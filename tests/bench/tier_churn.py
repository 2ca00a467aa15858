"""Moves blocks between GPU, host and disk: `python -m tests.bench.tier_churn --minutes 30`.

Requests with random beginnings of some documents run on a small engine, whose cache holds a part of
them. Now and then a request is cancelled, the engine is killed and started again, or a
file of its disk is damaged. Every output is compared with that of an engine without tiers; the
program prints its figures as JSON, and exits 1 at the first difference.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import GenerateRequest, GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from tests.bench.rounds import rounds
from tests.support.processes import start_engine

LENGTH, MAX_TOKENS, NUM_CLIENTS = 400, 6, 6
PLAIN = {"num_kv_blocks": 400}
TIERED = {"num_kv_blocks": 120, "host_kv_gb": 0.04, "disk_kv_gb": 0.02}
DEVICES = {
    "cpu": {"device": "cpu", "dtype": "float32"},
    # Else the other requests of a step would decide between nearly equal logits.
    "cuda": {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True},
}
FIGURES = ("host_hit_tokens", "disk_hit_tokens", "num_disk_faults", "num_disk_writes")


class Churn:
    """The documents, the outputs that they have, and the counts so far."""

    def __init__(self, order: random.Random, num_documents: int) -> None:
        self._order = order
        self._documents = [
            [order.randrange(5, 95) for _ in range(LENGTH)] for _ in range(num_documents)
        ]
        self._lengths = range(40, LENGTH, 45)
        self.expected: dict[tuple[int, int], list[int]] = {}
        self.counts: Counter[str] = Counter()

    async def learn(self, stub: EngineServiceStub) -> None:
        """Takes the outputs of an engine without tiers."""
        for document in range(len(self._documents)):
            for length in self._lengths:
                self.expected[document, length] = await self._generate(stub, (document, length))

    async def run(self, stub: EngineServiceStub, until_s: float) -> None:
        """Runs requests until a time."""
        clients = (self._run_client(stub, until_s) for _ in range(NUM_CLIENTS))
        await asyncio.gather(*clients)
        stats = await stub.GetStats(GetStatsRequest())
        self.counts.update({name: getattr(stats, name) for name in FIGURES})

    def damage_files(self, folder: Path) -> None:
        """Changes a bit of some files of blocks."""
        files = sorted(folder.rglob("*.block"))
        for path in self._order.sample(files, min(3, len(files))):
            data = bytearray(path.read_bytes())
            data[self._order.randrange(len(data))] ^= 1
            path.write_bytes(data)

    async def _run_client(self, stub: EngineServiceStub, until_s: float) -> None:
        for _ in rounds(until_s):
            which = (self._order.randrange(len(self._documents)), self._order.choice(self._lengths))
            if self._order.random() < 0.1:
                task = asyncio.ensure_future(self._generate(stub, which))
                await asyncio.sleep(self._order.random() * 0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self.counts["cancelled"] += 1
                continue
            if await self._generate(stub, which) != self.expected[which]:
                raise AssertionError(f"another text after {which[1]} tokens of {which[0]}")
            self.counts["compared"] += 1

    async def _generate(self, stub: EngineServiceStub, which: tuple[int, int]) -> list[int]:
        document, length = which
        sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        sampling.ignore_eos = True
        request = GenerateRequest(
            prompt_token_ids=self._documents[document][:length], sampling=sampling
        )
        token_ids: list[int] = []
        async for response in stub.Generate(request):
            token_ids += response.token_ids
        return token_ids


async def churn(
    minutes: float, between_kills_s: float, seed: int, num_documents: int, device: str
) -> Counter[str]:
    """Runs the whole program; returns its counts.

    device: a key of DEVICES.

    Raises:
        AssertionError: an output differs.
    """
    order = random.Random(seed)
    state = Churn(order, num_documents)
    plain, tiered = PLAIN | DEVICES[device], TIERED | DEVICES[device]
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(start_engine(**plain))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(engine.address))
        await state.learn(EngineServiceStub(channel))
    left_s = 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        while left_s > 0:
            async with AsyncExitStack() as stack:
                engine = await stack.enter_async_context(start_engine(disk_kv_dir=folder, **tiered))
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(engine.address))
                lifetime_s = min(left_s, between_kills_s * (0.5 + order.random()))
                left_s -= lifetime_s
                await state.run(EngineServiceStub(channel), time.monotonic() + lifetime_s)
                engine.signal(signal.SIGKILL)
                await asyncio.to_thread(engine.wait)
            state.counts["kills"] += 1
            state.damage_files(Path(folder))
    return state.counts


def main() -> int:
    """Reads the command line and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--between-kills-s", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    arguments = parser.parse_args()
    try:
        counts = asyncio.run(
            churn(
                arguments.minutes,
                arguments.between_kills_s,
                arguments.seed,
                arguments.documents,
                arguments.device,
            )
        )
    except AssertionError as error:
        print(f"tier_churn: {error}", file=sys.stderr)
        return 1
    print(json.dumps(counts, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
