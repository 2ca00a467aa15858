"""A running engine whose model Inductor compiles, with kernels tuned for sizes of their own."""

import asyncio
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.engine.v1.engine_pb2 import GetStatsResponse
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import engine_stub, generate, get_stats
from tests.support.processes import Flag, ServiceProcess
from tests.support.random_checkpoints import write_checkpoint

PROMPTS = ([5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [70] * 17)
NUM_OUTPUT = 12
COMPILE_S = 900
"""Longest cold start, on a busy CPU."""


@dataclass(frozen=True)
class Served:
    """The output of a run: first a request alone, then all together.

    compiled: the fields of the worker's log line `model_compiled`.
    """

    alone: list[int]
    together: list[list[int]]
    stats: GetStatsResponse
    compiled: dict[str, object]


def write_served_checkpoint(folder: Path, **changes: Any) -> Any:
    """Writes a random model with a tokenizer, as engines require; returns transformers' model."""
    # An indexer leaves a compiler something to do between our operators.
    reference = write_checkpoint(folder, "deepseek_v32", num_hidden_layers=3, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    return reference


def serve_compiled(folder: Path, **flags: Flag) -> Served:
    """Starts an engine at level 3, generates over gRPC, and stops it.

    A compilation after its start ends the engine.
    """
    engine = ServiceProcess(
        "services.engine",
        {
            "model": folder,
            "dtype": "float32",
            "compilation_level": 3,
            "capture_while_serving": False,
            "block_size": 4,
            "num_kv_blocks": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "worker_start_timeout_s": COMPILE_S,
            "log_format": "json",
            **flags,
        },
        ready_timeout_s=COMPILE_S,
    )
    with engine:
        alone, together, stats = asyncio.run(_generate(engine.address))
        until_s = time.monotonic() + COMPILE_S
        while '"model_compiled"' not in engine.log:
            assert time.monotonic() < until_s, "the model is compiled in the background"
            time.sleep(0.2)
        lines = [line for line in engine.log.splitlines() if '"model_compiled"' in line]
    return Served(alone, together, stats, json.loads(lines[-1]))


async def _generate(address: str) -> tuple[list[int], list[list[int]], GetStatsResponse]:
    limits = {"max_tokens": NUM_OUTPUT, "ignore_eos": True}
    async with engine_stub(address) as stub:
        alone = await generate(stub, PROMPTS[0], **limits)
        calls = (generate(stub, prompt, **limits) for prompt in PROMPTS)
        together = await asyncio.gather(*calls)
        return alone.token_ids, [each.token_ids for each in together], await get_stats(stub)
