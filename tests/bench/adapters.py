"""A captured decode step with low-rank adapters, beside one of a model without room for any.

    python -m tests.bench.adapters [--shape qwen3-8b] [--requests 32] [--rank 16] [--experts]
        [--adapters 0 1 16] [--layers N] [--device cpu] [--json out.json]
    python -m tests.bench.adapters --kernels [--rank 16] [--json out.json]

Random weights. The first row has no room for adapters; with 0 adapters there is room, and no
request uses one. Else requests use that many in turn. Aims of Qwen3-8B on an H200, with rank 16 and
32 requests: 6 % more than none with one adapter, 12 % with 16. On a CPU nothing is captured.

--kernels has a row for each product of Qwen3-8B by tokens and adapters: microseconds of the product
alone, of each kernel of adapters alone, of all three as a layer runs them, what they add to the
product, and how long reading A and B takes.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from models.layers.adapter_room import adapted_layers, experts_by_layer, make_room
from models.loading.loader import load_model
from models.ops.products.add_adapters import expand_slots, shrink_slots
from models.ops.products.linear import linear
from tests.bench.decode_step import REPLAYS, DecodeStep
from tests.bench.kernels import BYTES_PER_US, CACHE_BYTES, microseconds
from tests.bench.machine import commit, machine, versions
from tests.bench.model_folder import make_model_folder, shape_names

PROJECTIONS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
"""Inputs and outputs of the products of Qwen3-8B."""
TOKENS = (1, 8, 32, 64, 128, 512)
NUM_SLOTS = 16


def fill(model, size: float = 0.01) -> None:
    """Gives all slots random adapters."""
    rooms = [*adapted_layers(model)]
    for experts in experts_by_layer(model).values():
        rooms += [room for room in (experts.gate_up_room, experts.down_room) if room is not None]
    for room in rooms:
        room.adapter_a.normal_(0, size)
        room.adapter_b.normal_(0, size)


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
        slots = requests % count + 1 if count else torch.zeros_like(requests)
        add(f"{count} adapters", slots.int())
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A layer's product and its adapters, of T tokens; see models.ops.products.add_adapters."""

    x: torch.Tensor
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[int, ...]
    slots: torch.Tensor

    def multiply(self) -> torch.Tensor:
        """Returns the product alone."""
        return linear(self.x, self.weight, None)

    def shrink(self) -> torch.Tensor:
        """Runs the first kernel."""
        return shrink_slots(self.x, self.a, self.slots)

    def expand(self, product: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Runs the second kernel."""
        return expand_slots(product, inner, self.b, self.parts, self.slots)

    def run(self) -> torch.Tensor:
        """Runs all as a layer does."""
        inner = self.shrink()
        return self.expand(self.multiply(), inner)


def make_products(name: str, rank: int, num_tokens: int, count: int) -> list[Product]:
    """Returns products of as many layers as the second-level cache cannot hold."""
    num_inputs, parts = PROJECTIONS[name]
    num_outputs, num_inner = sum(parts), len(parts) * rank
    factor_bytes = 2 * max(1, count) * min(num_inner * num_inputs, num_outputs * rank)
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    tokens = torch.arange(num_tokens, device="cuda")
    slots = tokens % count + 1 if count else torch.zeros_like(tokens)
    # The weights of several layers do not fit as well, and take most of the memory.
    weights = [draw(num_outputs, num_inputs) for _ in range(3)]
    return [
        Product(
            x=draw(num_tokens, num_inputs),
            weight=weights[index % len(weights)],
            a=draw(NUM_SLOTS, num_inner, num_inputs),
            b=draw(NUM_SLOTS, num_outputs, rank),
            parts=parts,
            slots=slots.int(),
        )
        for index in range(max(3, min(24, CACHE_BYTES // factor_bytes + 1)))
    ]


@torch.inference_mode()
def measure_kernels(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Prints a row for each product, number of tokens and of adapters, and returns them."""
    rows: dict[str, dict[str, float]] = {}
    columns = ("product", "shrink", "expand", "all", "added", "reads")
    print(f"{'':>24}" + "".join(f"{each:>9}" for each in columns), flush=True)
    for name in PROJECTIONS:
        for num_tokens in TOKENS:
            for count in options.adapters:
                if count > num_tokens:
                    continue
                products = make_products(name, options.rank, num_tokens, count)
                pairs = [(each.multiply(), each.shrink()) for each in products]
                factor_bytes = 2 * count * (products[0].a[0].numel() + products[0].b[0].numel())
                row = {
                    "product": microseconds([each.multiply for each in products], 4),
                    "shrink": microseconds([each.shrink for each in products], 4),
                    "expand": microseconds(
                        [
                            partial(each.expand, *pair)
                            for each, pair in zip(products, pairs, strict=True)
                        ]
                    ),
                    "all": microseconds([each.run for each in products], 4),
                    "reads": factor_bytes / BYTES_PER_US,
                }
                row["added"] = row["all"] - row["product"]
                label = f"{name} {num_tokens} x {count}"
                rows[label] = row
                print(f"{label:>24}" + "".join(f"{row[each]:9.2f}" for each in columns), flush=True)
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
    parser.add_argument("--kernels", action="store_true", help="kernels instead of whole steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.kernels:
        rows = measure_kernels(options)
    else:
        with TemporaryDirectory() as parent:
            folder = make_model_folder(options.shape, Path(parent), options.layers)
            rows = measure(options, folder)
    if options.json is not None:
        facts = {"commit": commit(), "machine": machine(), "versions": versions()}
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({**facts, "settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
