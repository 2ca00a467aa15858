"""Times FP8 products of linear layers against the bfloat16 product and against reading the weights.

    python -m tests.bench.fp8_products [--json out.json]

Activations of up to 64 tokens are not rounded; of more, their rounding is counted. Each figure is
the median of replays of a graph of launches that walk over more weights than the second-level cache
holds; the floor is the larger of reading the FP8 weights at 4,482 GB/s and an H200's FP8
arithmetic, taken as twice its bfloat16.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional

from models.number_formats import BLOCK, FP8
from models.ops.linear.linear import linear
from tests.bench.kernels import BYTES_PER_US, FLOP_PER_US, copies, microseconds

SHAPES = {
    "8B qkv": (4096, 6144),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
    "V3 q_b": (1536, 24576),
    "V3 o": (16384, 7168),
}
TOKENS = (1, 16, 32, 64, 128, 512, 2048)


def measure(num_tokens: int, size: int, num_columns: int) -> dict[str, float]:
    """Returns microseconds of each kind of product, its floor, and its error from the exact one."""
    x = torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16)
    count = copies(size * num_columns)
    plain = [torch.randn(num_columns, size, device="cuda").bfloat16() for _ in range(count)]
    weights = [weight.to(FP8) for weight in plain]
    rows = torch.ones(num_columns, 1, device="cuda")
    blocks = torch.ones(-(-num_columns // BLOCK), -(-size // BLOCK), device="cuda")
    exact = x.float() @ weights[0].float().t()

    def error(output: torch.Tensor) -> float:
        return float((output.float() - exact).norm() / exact.norm())

    flop = 2 * num_tokens * size * num_columns
    return {
        "bf16_us": microseconds([lambda w=w: functional.linear(x, w) for w in plain]),
        "rows_us": microseconds([lambda w=w: linear(x, w, None, rows) for w in weights]),
        "blocks_us": microseconds([lambda w=w: linear(x, w, None, blocks) for w in weights]),
        "floor_us": max(size * num_columns / BYTES_PER_US, flop / (2 * FLOP_PER_US)),
        "rows_error": error(linear(x, weights[0], None, rows)),
        "blocks_error": error(linear(x, weights[0], None, blocks)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for (name, shape), num_tokens in product(SHAPES.items(), TOKENS):
        figures = measure(num_tokens, *shape)
        print(f"{name:12} {num_tokens:5}", {key: round(value, 4) for key, value in figures.items()})
        results.append({"layer": name, "tokens": num_tokens, **figures})
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
