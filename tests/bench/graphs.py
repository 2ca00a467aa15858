"""Decode steps with and without graphs: one scheduler and one ModelRunner in one process.

python -m tests.bench.graphs MODEL_FOLDER [--batch-sizes 1 8 32] [--device cuda]; random weights.
"""

import argparse
import statistics
from pathlib import Path

import torch

from models.cudagraph_mode import CUDAGraphMode
from services.engine.compilation_config import CompilationConfig
from tests.support.graph_engine import GraphEngine

PROMPT_LEN = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--num-output", type=int, default=96)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    engines = {
        "eager": _engine(options, CUDAGraphMode.NONE),
        "full": _engine(options, CUDAGraphMode.FULL_DECODE_ONLY),
    }
    outcomes = engines["full"].capture()
    seconds = sorted(outcome.capture_s for outcome in outcomes)
    print(
        f"{len(outcomes)} graphs, {sum(not outcome.fault for outcome in outcomes)} of them good, "
        f"captured in {sum(seconds):.2f} s (slowest {seconds[-1]:.2f} s, median "
        f"{statistics.median(seconds):.3f} s), "
        f"{sum(outcome.num_bytes for outcome in outcomes) / 2**20:.0f} MiB"
    )
    print(f"{'batch':>6} {'eager ms':>9} {'full ms':>9} {'ratio':>6}  same tokens")
    for batch_size in options.batch_sizes:
        outputs, ms = {}, {}
        for name, engine in engines.items():
            outputs[name], ms[name] = _decode(engine, batch_size, options.num_output)
        same = sum(a == b for a, b in zip(outputs["eager"], outputs["full"], strict=True))
        print(
            f"{batch_size:>6} {ms['eager']:>9.3f} {ms['full']:>9.3f} "
            f"{ms['eager'] / ms['full']:>6.2f}  {same}/{batch_size}"
        )


def _engine(options: argparse.Namespace, mode: CUDAGraphMode) -> GraphEngine:
    largest = max(options.batch_sizes)
    length = PROMPT_LEN + options.num_output + 16
    on_cuda = options.device == "cuda"
    return GraphEngine(
        options.model,
        CompilationConfig(cudagraph_mode=mode),
        device=options.device,
        dtype=torch.bfloat16 if on_cuda else torch.float32,
        load_format="dummy",
        max_num_seqs=largest,
        max_num_batched_tokens=max(2048, largest),
        max_model_len=2048,
        num_blocks=largest * -(-length // 16) + 16,
        block_size=16,
    )


def _decode(engine: GraphEngine, batch_size: int, num_output: int) -> tuple[list[list[int]], float]:
    """Returns the outputs and the median milliseconds of a decode step of the whole batch."""
    first = len(engine.steps)
    # A token of their own at the front keeps the prefix cache out of it.
    prompts = [
        [(first + index) % 1000, index, *range(PROMPT_LEN - 2)] for index in range(batch_size)
    ]
    outputs = engine.run(prompts, num_output)
    steps = engine.steps[first:]
    times = engine.finished_s[first:]
    gaps = [
        later - earlier
        for earlier, later, (descriptor, _) in zip(times, times[1:], steps[1:], strict=False)
        if descriptor.context.num_tokens == descriptor.context.batch_size == batch_size
    ]
    return outputs, statistics.median(gaps) * 1000


if __name__ == "__main__":
    main()
