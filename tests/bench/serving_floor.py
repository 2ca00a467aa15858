"""The least time that a serving workload can take: `python -m tests.bench.serving_floor`.

    python -m tests.bench.serving_floor --shape qwen3-8b --kv-cache-dtype fp8_e4m3

All requests run at once: their prompts first, then one step for each position of the outputs, with
a row for each request whose output is that long. Nothing is added for what goes on in between.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from models.config import CONFIG_FILE, ModelConfig
from models.kv_cache import FP8_CACHE_DTYPE
from tests.bench.floor import BYTES_PER_MS, FLOP_PER_MS, StepFloor, step_floor
from tests.bench.model_folder import read_shape, shape_names
from tests.bench.workload import Job, serving_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFloor:
    """Where the least time of a workload goes, in seconds.

    prompt_products: of all prompts' tokens with the weights, which are read at least once.
    prompt_attention: its arithmetic. decode_products: of each step, or reading its weights where
    that takes longer. decode_attention: reading every running sequence's keys and values.
    overlapped: all bytes or all arithmetic, whichever takes longer.
    """

    prompt_products: float
    prompt_attention: float
    decode_products: float
    decode_attention: float
    overlapped: float

    @property
    def one_after_the_other(self) -> float:
        """The least time if attention and products never run at the same time."""
        prompts = self.prompt_products + self.prompt_attention
        return prompts + self.decode_products + self.decode_attention

    def figures(self) -> dict[str, float]:
        """Returns all of them by name."""
        return {**asdict(self), "one_after_the_other": self.one_after_the_other}


def serving_floor(step: StepFloor, jobs: Sequence[Job]) -> ServingFloor:
    """Returns the floor of jobs that are submitted at once; each gives one token or more.

    A prompt's step samples its first token, so that each later one costs a row of a decode step.
    """
    num_prompt = sum(len(job.prompt) for job in jobs)
    longest = max(job.num_output for job in jobs)
    rows = [sum(job.num_output > position for job in jobs) for position in range(1, longest)]
    prompt_bytes = step.weight_bytes(num_prompt)
    prompt_flop = step.token_flop(num_prompt, len(jobs))
    prompt_pairs = sum(step.prompt_attention_flop(len(job.prompt)) for job in jobs)
    weights = [step.weight_bytes(num_rows) for num_rows in rows]
    products = [step.token_flop(num_rows, num_rows) for num_rows in rows]
    cached = _cache_bytes(step, jobs)
    all_bytes = prompt_bytes + sum(weights) + cached
    all_flop = prompt_flop + prompt_pairs + sum(products)
    return ServingFloor(
        prompt_products=_longer_s(prompt_bytes, prompt_flop),
        prompt_attention=_longer_s(0, prompt_pairs),
        decode_products=sum(map(_longer_s, weights, products)),
        decode_attention=_longer_s(cached, 0),
        overlapped=_longer_s(all_bytes, all_flop),
    )


def _cache_bytes(step: StepFloor, jobs: Sequence[Job]) -> float:
    """Returns the bytes of the cache that all decode steps together read."""
    longest = max(len(job.prompt) + job.num_output for job in jobs)
    of_context = [step.cache_bytes(context) for context in range(longest)]
    return sum(
        sum(of_context[len(job.prompt) + 1 : len(job.prompt) + job.num_output]) for job in jobs
    )


def _longer_s(num_bytes: float, flop: float) -> float:
    """Returns how long reading takes, or arithmetic if that takes longer."""
    return max(num_bytes / BYTES_PER_MS, flop / FLOP_PER_MS) / 1000


def main() -> None:
    """Prints the floor of the serving workload for one shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=shape_names(), required=True)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--requests", type=int, default=512)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="octavo-bench-") as folder:
        Path(folder, CONFIG_FILE).write_text(json.dumps(read_shape(arguments.shape)))
        config = ModelConfig.from_folder(Path(folder))
    is_auto = arguments.kv_cache_dtype == "auto"
    dtype = getattr(torch, config.dtype) if is_auto else FP8_CACHE_DTYPE
    floor = serving_floor(step_floor(config, dtype), serving_jobs(arguments.requests))
    for name, seconds in floor.figures().items():
        print(f"{name:20} {seconds:8.3f} s")


if __name__ == "__main__":
    main()
