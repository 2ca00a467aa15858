"""Falling asleep and waking, beside the copies and the loading that they cannot do without.

    python -m tests.bench.sleep_times --shape qwen3-8b --out sleep.json

A checkpoint of the shape's size is written first, to --folder, unless it has one. The floor of
level 1 is the weights' bytes by the measured speed of copies from and to pinned memory; that of
waking from level 2 is the time in which an engine without --enable-sleep loads the same weights,
from the same page cache.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig
from services.engine.core.sleep import LEVELS, SleepMode
from tests.bench.loading import write_weights
from tests.bench.model_folder import TINY, make_model_folder, shape_names
from tests.bench.report import Report
from tests.support.ranks_core import RanksCore, ranks_core
from tests.support.step_driver import sampling

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
NUM_COPIES = 5
TIMEOUT_S = 600.0
PROMPTS = [list(range(5, 5 + length)) for length in (3, 17, 64)]


class CopySpeeds(NamedTuple):
    """Bytes per second between pinned memory and the device."""

    to_device: float
    from_device: float


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="for the checkpoint; one that is there is used")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-kv-blocks", type=int, help="absent: all of the memory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    report = Report(
        "sleep_times", path=arguments.out, shape=arguments.shape, commit_name=arguments.commit
    )
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(arguments, checkpoint(arguments, Path(folder)), report))
    print(report.table())
    print("aims for 8 billion parameters: level 1 wakes in under 3 s, level 2 within 1.2 x loading")


def checkpoint(arguments: argparse.Namespace, parent: Path) -> Path:
    """Returns a folder with weights of the shape, which are written if need be."""
    if arguments.shape == TINY:
        return TINY_CHECKPOINT
    parent = arguments.folder or parent
    if not list((parent / arguments.shape).glob("*.safetensors")):
        folder = make_model_folder(arguments.shape, parent)
        write_weights(folder, _weight_shapes(folder))
    return parent / arguments.shape


def _weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    is_tied = config.tie_word_embeddings
    return {
        name: tuple(tensor.shape)
        for name, tensor in weights.items()
        if not (is_tied and name == "lm_head.weight")
    }


def copy_speeds(device: torch.device) -> CopySpeeds:
    """Measures copies of 1 GiB, the best of several, or less without a GPU."""
    num_bytes = COPIED_BYTES[device.type]
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda").zero_()
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    speeds = []
    for target, source in ((there, host), (host, there)):
        times_s = []
        for _ in range(NUM_COPIES):
            started_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times_s.append(time.perf_counter() - started_s)
        speeds.append(num_bytes / min(times_s))
    return CopySpeeds(*speeds)


async def _measure(arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    speeds = copy_speeds(torch.device(arguments.device))
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    report.add("copies to the device", [speeds.to_device / 1e9], "GB/s", "higher")
    report.add("copies from the device", [speeds.from_device / 1e9], "GB/s", "higher")
    flags = {
        "model": folder,
        "device": arguments.device,
        "histogram_dir": "",
        "num_kv_blocks": arguments.num_kv_blocks,
        "max_model_len": 2048,
        "log_level": "warning",
    }
    loads_s = []
    for _ in range(2):  # the first one may read the disk
        async with ranks_core(EngineConfig.from_flags(**flags)) as ranks:
            assert ranks.core.worker is not None
            loads_s.append(ranks.core.worker.load_s)
    report.add("loading", loads_s[1:], "s")
    async with ranks_core(EngineConfig.from_flags(**flags, enable_sleep=True)) as ranks:
        assert ranks.core.worker is not None
        report.add("loading, with --enable-sleep", [ranks.core.worker.load_s], "s")
        await _sleep_often(ranks, arguments.repeats, speeds, loads_s[-1], report)


async def _sleep_often(
    ranks: RanksCore, repeats: int, speeds: CopySpeeds, load_s: float, report: Report
) -> None:
    core, greedy = ranks.core, sampling(max_tokens=32)
    assert core.worker is not None
    num_bytes = sum(each.bytes for each in core.worker.weights)
    report.state("weights, bytes", num_bytes)
    report.state("KV cache, bytes", core.worker.block_bytes * core.worker.num_blocks)
    expected = await ranks.generate(PROMPTS, greedy)
    floors = {1: (num_bytes / speeds.from_device, num_bytes / speeds.to_device), 2: (None, load_s)}
    for level in LEVELS:
        asleep_s, awake_s = [], []
        for _ in range(repeats):
            asleep = await core.sleep.fall_asleep(level, SleepMode.WAIT, TIMEOUT_S)
            awake = await core.sleep.wake()
            asleep_s.append(asleep.took_s)
            awake_s.append(awake.took_s)
            if await ranks.generate(PROMPTS, greedy) != expected:
                report.problem(f"level {level}: tokens differ after waking")
        sleep_floor_s, wake_floor_s = floors[level]
        report.add(f"level {level}, falling asleep", asleep_s, "s", floor=sleep_floor_s)
        report.add(f"level {level}, waking", awake_s, "s", floor=wake_floor_s)


if __name__ == "__main__":
    main()
