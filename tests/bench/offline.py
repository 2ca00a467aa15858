"""Decode, prefill, serving and start of the engine without gRPC: `python -m tests.bench.offline`.

    python -m tests.bench.offline --shape qwen3-8b --out qwen3-8b.json [engine flags]
    python -m tests.bench.offline --shape deepseek-v3 --num-layers 6 --only decode,prefill
    python -m tests.bench.offline --shape qwen3.8-27b --long-decodes 8x12000 --max-model-len 12544
    python -m tests.bench.offline --shape tiny --device cpu --only decode --divide-by 8

The scheduler runs in this process and a worker in its own, as in the service. With --cold the
engine is started twice: with empty caches, and again with what the first start left in them.
"""

import argparse
from contextlib import ExitStack

import torch

from models.kv_cache import FP8_CACHE_DTYPE
from tests.bench.empty_caches import empty_caches
from tests.bench.figures import DECODE_PROMPT, Bench
from tests.bench.floor import MEASURED_ON, StepFloor, step_floor
from tests.bench.offline_engine import OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import Settings, list_of, list_of_numbers, list_of_pairs, make_parser

PARTS = ("decode", "prefill", "serving")


def make_bench(settings: Settings, engine: OfflineEngine, report: Report, divide_by: int) -> Bench:
    """Returns an engine's measurements with the limits of its model."""
    return Bench(
        engine,
        report,
        settings.budget,
        vocab_size=settings.model.vocab_size,
        max_model_len=settings.max_model_len,
        floor=known_floor(settings, report) if divide_by == 1 else None,
        divide_by=divide_by,
    )


def known_floor(settings: Settings, report: Report) -> StepFloor | None:
    """Returns the least time of the model's steps; None on GPUs that were never measured."""
    is_measured = MEASURED_ON in (report.content["machine"]["gpu"] or "")
    if not is_measured or settings.config.parallel.num_ranks > 1:
        return None
    config, model = settings.config, settings.model
    asked = config.checkpoint.dtype
    dtype = getattr(torch, model.dtype if asked == "auto" else asked)
    return step_floor(model, dtype if config.cache.kv_cache_dtype == "auto" else FP8_CACHE_DTYPE)


async def measure(settings: Settings, report: Report) -> None:
    """Starts, measures and stops."""
    arguments, config = settings.arguments, settings.config
    with ExitStack() as stack:
        if arguments.cold:
            folder = stack.enter_context(empty_caches())
            config = config.with_flags(compile_cache_dir=folder)
            async with offline_engine(config) as engine:
                await add_start(make_bench(settings, engine, report, arguments.divide_by), "cold")
        async with offline_engine(config) as engine:
            bench = make_bench(settings, engine, report, arguments.divide_by)
            await add_start(bench, "warm" if arguments.cold else "")
            report.state("graphs", engine.graph_facts())
            if "decode" in arguments.only:
                await bench.add_decode(arguments.batches, arguments.repeats, arguments.contexts)
                for batch, context in arguments.long_decodes:
                    await bench.add_decode([batch], arguments.repeats, [context])
            if "prefill" in arguments.only:
                await bench.add_prefill(arguments.prompts, arguments.repeats)
            if "serving" in arguments.only:
                await bench.add_serving(arguments.requests, arguments.serving_repeats)
                await bench.add_limited_serving(arguments.requests, arguments.at_once)
            bench.state_memory()


async def add_start(bench: Bench, kind: str) -> None:
    """Reports how long an engine took to start; kind is cold, warm or empty for unknown caches."""
    parts = await bench.start()
    name = f"{kind} start".strip()
    bench.report.add(f"{name} to ready", [parts["ready"]], "s")
    bench.report.add(f"{name} to first token", [parts["first_token"]], "s")
    bench.report.state(name, parts | {"weights": round(bench.engine.worker.load_s, 3)})


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", type=list_of(*PARTS), default=[*PARTS], help="parts to measure")
    parser.add_argument("--batches", type=list_of_numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument(
        "--contexts",
        type=list_of_numbers,
        default=[DECODE_PROMPT],
        help="tokens of a prompt before it decodes",
    )
    parser.add_argument(
        "--long-decodes",
        type=list_of_pairs,
        default=[],
        help="further requests and tokens of their prompts, such as 8x12000",
    )
    parser.add_argument("--prompts", type=list_of_numbers, default=[2048, 8192])
    parser.add_argument("--requests", type=int, default=512, help="of the serving workload")
    parser.add_argument("--repeats", type=int, default=5, help="of decode and prefill")
    parser.add_argument("--serving-repeats", type=int, default=2)
    parser.add_argument(
        "--at-once",
        type=list_of_numbers,
        default=[],
        help="further runs of it, with at most as many requests at a time",
    )
    parser.add_argument("--cold", action="store_true", help="start with empty caches, then again")
    parser.add_argument("--divide-by", type=int, default=1, help="make all lengths shorter")
    return parser


def main() -> None:
    """Measures and prints."""
    run_program("offline", own_parser(), measure)


if __name__ == "__main__":
    main()
