"""A captured decode step with low-rank adapters, beside one of a model without room for any.

    python -m tests.bench.adapters [--shape qwen3-8b] [--requests 32] [--rank 16] [--experts]
        [--adapters 0 1 16] [--layers N] [--fused] [--device cpu] [--json out.json]

Random weights. The first row has no room for adapters; with 0 adapters there is room, and no
request uses one. Else requests use that many in turn. --fused runs the compiler's passes, as an
engine does. Aims of Qwen3-8B on an H200, with rank 16 and 32 requests: 6 % more than none with one
adapter, 12 % with 16. On a CPU nothing is captured.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from models.layers.adapter_room import adapted_layers, experts_by_layer, make_room
from models.loading.loader import load_model
from services.engine.compilation.pieces.linking import run_as_traced
from services.engine.compilation.trace.tracing import trace_programs
from tests.bench.decode_step import REPLAYS, DecodeStep
from tests.bench.machine import commit, machine, versions
from tests.bench.model_folder import make_model_folder, shape_names
from tests.support.compilation import compilation_config

MOST_TOKENS = 8192
"""Most tokens in a step of the traced model."""


def fill(model, size: float = 0.01) -> None:
    """Gives all slots random adapters."""
    rooms = [*adapted_layers(model)]
    for experts in experts_by_layer(model).values():
        rooms += [room for room in (experts.gate_up_room, experts.down_room) if room is not None]
    for room in rooms:
        room.adapter_a.normal_(0, size)
        room.adapter_b.normal_(0, size)


def fuse(model) -> None:
    """Makes a model run the operators that the compiler's passes leave."""
    device = next(model.parameters()).device
    kinds = (torch.int32, torch.int64)
    model.__dict__.pop("forward", None)
    traced = trace_programs(
        model,
        compilation_config(level=3, use_inductor=False),
        example_inputs=[torch.zeros(8, dtype=kind, device=device) for kind in kinds],
        max_num_tokens=MOST_TOKENS,
    )
    model.forward = run_as_traced(traced)


@torch.inference_mode()
def milliseconds(step: DecodeStep) -> tuple[float, float, float]:
    """Returns the median, least and most milliseconds of a step."""
    if step.rows.is_cuda:
        return step.milliseconds()
    times = []
    for _ in range(REPLAYS):
        started_s = time.perf_counter()
        step.run()
        times.append(1000 * (time.perf_counter() - started_s))
    return statistics.median(times), min(times), max(times)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Prints a row for each number of adapters and returns them."""
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(folder, device=device, dtype=dtype, load_format="dummy")
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, slots: torch.Tensor | None) -> None:
        if options.fused:
            fuse(model)
        step = DecodeStep(model, options.requests, options.context, slots)
        median, least, most = milliseconds(step)
        over = median / rows["no room"]["median"] - 1 if rows else 0.0
        rows[name] = {"median": median, "least": least, "most": most, "over none": over}
        print(f"{name:>12} {median:8.3f} ms ({least:.3f} to {most:.3f}) {over:+7.1%}", flush=True)

    add("no room", None)
    make_room(
        model,
        num_slots=max(1, *options.adapters),
        max_rank=options.rank,
        with_experts=options.experts,
    )
    fill(model)
    requests = torch.arange(options.requests, device=device)
    for count in options.adapters:
        add(f"{count} adapters", (requests % count + 1).int() if count else None)
    return rows


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the shape; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--experts", action="store_true", help="of routed experts, too")
    parser.add_argument("--fused", action="store_true", help="with the compiler's passes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as parent:
        folder = make_model_folder(options.shape, Path(parent), options.layers)
        rows = measure(options, folder)
    if options.json is not None:
        facts = {"commit": commit(), "machine": machine(), "versions": versions()}
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({**facts, "settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
