"""Graphs of large prefill steps against eager ones: `python -m tests.bench.large_steps`.

    python -m tests.bench.large_steps --shape qwen3-8b --mode full --level 0 --out large.json

For each size a prompt of as many tokens runs as one step: eagerly, by a graph of its size, and, an
eighth of a power of two shorter, by the same graph with padding. A graph is worth its memory where
its two times are below the eager ones. Both engines share the weights; runs alternate.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from models.cudagraph_mode import CUDAGraphMode
from tests.bench.model_folder import make_model_folder, shape_names
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

SIZES = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
ROUNDS = 7


def padded_size(size: int) -> int:
    """Returns the smallest prompt for a graph of `size` tokens, among eighths of powers of two."""
    return size - (1 << (size - 1).bit_length()) // 16 + 1


def make_engine(
    folder: Path,
    arguments: argparse.Namespace,
    mode: CUDAGraphMode,
    model: torch.nn.Module | None = None,
) -> GraphEngine:
    """Returns an engine for single prompts of the largest size."""
    largest = max(arguments.sizes)
    config = compilation_config(
        level=arguments.level,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=[1],
        cudagraph_piece_sizes=sorted(arguments.sizes),
    )
    return GraphEngine(
        folder,
        config,
        device=arguments.device,
        dtype=torch.bfloat16,
        load_format="dummy",
        max_num_seqs=4,
        max_num_batched_tokens=largest,
        max_model_len=largest + 16,
        num_blocks=-(-largest // 16) + 8,
        block_size=16,
        model=model,
    )


def step_ms(engine: GraphEngine, num_tokens: int) -> float:
    """Returns the time of one prompt as one step, from its submission to its token."""
    # Another first token each time, as the last prompt's blocks are cached.
    prompt = [len(engine.steps) % 1000 + 1, *(index % 1000 + 1 for index in range(num_tokens - 1))]
    started_s = time.perf_counter()
    engine.run([prompt], 1)
    return 1000 * (time.perf_counter() - started_s)


def main() -> None:
    """Measures all sizes and prints or writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-8b")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--mode", choices=["full", "piecewise"], default="full")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as parent:
        folder = make_model_folder(arguments.shape, Path(parent), arguments.num_layers)
        eager = make_engine(folder, arguments, CUDAGraphMode.NONE)
        graphs = make_engine(folder, arguments, CUDAGraphMode[arguments.mode.upper()], eager.model)
    outcomes = {outcome.key.num_tokens: outcome for outcome in graphs.capture()}
    rows = []
    for size in sorted(arguments.sizes):
        short = padded_size(size)
        cases = {
            "eager_ms": (eager, size),
            "graph_ms": (graphs, size),
            "eager_shorter_ms": (eager, short),
            "padded_graph_ms": (graphs, short),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.rounds + 1):
            for name, (engine, num_tokens) in cases.items():
                times[name].append(step_ms(engine, num_tokens))
        rows.append(
            {
                "num_tokens": size,
                "shorter": short,
                # The first round builds kernels.
                **{name: round(median(found[1:]), 3) for name, found in times.items()},
                "capture_s": round(outcomes[size].capture_s, 3),
                "num_mb": outcomes[size].num_bytes // 2**20,
                "fault": outcomes[size].fault,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"arguments": vars(arguments), "rows": rows}, default=str)
        )


if __name__ == "__main__":
    main()
