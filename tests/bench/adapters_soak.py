"""Random traffic of many adapters for some minutes: tokens of merged models, and flat memory.

    python -m tests.bench.adapters_soak --minutes 5 [--adapters 100] [--slots 4] [--family qwen3]
        [--device cpu] [--experts] [--json out.json]

Requests of adapters and of the base run on a small random checkpoint, in float32. Each output is
compared with that of transformers' model with the adapter merged. Meanwhile adapters leave and come
back. Host memory of the engine and of its worker is sampled; the table has its mean in each sixth
of the time. The exit code is 1 if an output differs.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import structlog
import torch

from services.engine.rpc.stats import stats_to_proto
from tests.bench.machine import commit, machine, versions
from tests.bench.rounds import rounds
from tests.support.adapter_engine import AdapterCase
from tests.support.ranks_core import RanksCore, ranks_config, ranks_core
from tests.support.step_driver import sampling

MIB = 2**20
NUM_TOKENS = 12
PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [5, 17, 3, 8, 2, 7, 1]]
SAMPLE_S = 0.5
NUM_PERIODS = 6
CHANGE_S = 0.2
"""Time between two adapters that leave and come back."""


@dataclass
class Soak:
    """The traffic, and what came of it."""

    case: AdapterCase
    expected: dict[tuple[str, int], list[int]]
    order: random.Random
    ends_s: float
    counts: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[float]] = field(default_factory=dict)

    async def ask(self, ranks: RanksCore) -> None:
        """Sends one request after the other and compares their outputs."""
        greedy = sampling(max_tokens=NUM_TOKENS)
        for _ in rounds(self.ends_s):
            known = [each.name for each in ranks.core.adapters.all]
            # A few adapters get most requests, as in life.
            name = known[int(len(known) * self.order.random() ** 3)]
            name = "" if self.order.random() < 0.1 else name
            number = self.order.randrange(len(PROMPTS))
            sink = ranks.submit(PROMPTS[number], greedy, (), name)
            last = await sink.wait_for_end()
            assert last.error is None, last.error
            self.counts["requests"] += 1
            self.counts["different"] += sink.token_ids != self.expected[name, number]

    async def change(self, ranks: RanksCore) -> None:
        """Removes adapters and adds them again."""
        adapters = ranks.core.adapters
        for _ in rounds(self.ends_s):
            name = self.order.choice([each.name for each in adapters.all])
            adapters.remove(name)
            await asyncio.sleep(CHANGE_S)
            await adapters.load(name, name)
            self.counts["changes"] += 1

    async def sample(self, ranks: RanksCore) -> None:
        """Takes samples of memory."""
        processes = {"engine": psutil.Process()}
        for rank in ranks.core.stats().ranks:
            processes[f"worker {rank.rank}"] = psutil.Process(rank.pid)
        for _ in rounds(self.ends_s):
            for name, process in processes.items():
                self.memory.setdefault(name, []).append(process.memory_info().rss / MIB)
            await asyncio.sleep(SAMPLE_S)

    def table(self) -> dict[str, list[float]]:
        """Returns the mean memory, MiB, in each period of the time, and the most at last."""
        table = {}
        for name, values in self.memory.items():
            ends = [len(values) * each // NUM_PERIODS for each in range(NUM_PERIODS + 1)]
            means = [statistics.mean(values[a:b] or [0]) for a, b in pairwise(ends)]
            table[name] = [*means, max(values)]
        return table


def prepare(options: argparse.Namespace, folder: Path) -> Soak:
    """Writes the checkpoint and the adapters and computes all outputs."""
    case = AdapterCase(
        folder, options.family, num_adapters=options.adapters, with_experts=options.experts
    )
    expected = {
        (name, number): case.expected(prompt, name, NUM_TOKENS)
        for name in case.merged
        for number, prompt in enumerate(PROMPTS)
    }
    # The models would be part of the engine's memory.
    case.merged = dict.fromkeys(case.merged)
    return Soak(case, expected, random.Random(options.seed), 0.0)


async def run(options: argparse.Namespace, soak: Soak) -> dict[str, object]:
    """Runs the traffic and returns the figures."""
    config = ranks_config(
        soak.case.base,
        **soak.case.flags(),
        lora_folder=soak.case.folder / "adapters",
        max_loras=options.slots,
        device=options.device,
        dtype="float32",
        num_kv_blocks=96,
        # Short prompts share small blocks; tests of engines on GPUs have larger ones.
        block_size=16 if options.device == "cuda" else 4,
    )
    async with ranks_core(config) as ranks:
        soak.ends_s = time.monotonic() + 60 * options.minutes
        async with asyncio.TaskGroup() as tasks:
            for _ in range(options.concurrency):
                tasks.create_task(soak.ask(ranks))
            tasks.create_task(soak.change(ranks))
            tasks.create_task(soak.sample(ranks))
        stats = stats_to_proto(ranks.core.stats(), num_sessions=0)
    adapters = stats.adapters
    return {
        **soak.counts,
        "slot loads": adapters.num_slot_loads,
        "evictions": adapters.num_evictions,
        "reads": adapters.num_read,
        "preemptions": stats.num_preemptions,
        "cached tokens": stats.cached_tokens,
        "used blocks at the end": stats.num_blocks - 1 - stats.num_free_blocks,
    }


def main() -> None:
    """Runs, prints a table, and exits with 1 if an output differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--family", default="qwen3", help="of tests.support.random_checkpoints")
    parser.add_argument("--experts", action="store_true", help="adapt routed experts, too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with TemporaryDirectory() as folder:
        soak = prepare(options, Path(folder))
        figures = asyncio.run(run(options, soak))
    for name, figure in figures.items():
        print(f"{name:>24} {figure}")
    for name, row in soak.table().items():
        *means, most = (f"{value:.1f}" for value in row)
        print(f"{name:>24} {' '.join(means)} MiB, most {most}")
    if options.json is not None:
        facts = {"commit": commit(), "machine": machine(), "versions": versions()}
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        report = {**facts, "settings": settings, "figures": figures, "memory": soak.table()}
        options.json.write_text(json.dumps(report))
    sys.exit(figures["different"] > 0)


if __name__ == "__main__":
    main()
