"""Times the kernels of low-rank adapters beside the products that they add to.

    python -m tests.bench.adapter_kernels [--rank 16] [--adapters 0 1 16] [--json out.json]

A row for each product of Qwen3-8B by tokens and adapters, in microseconds: the product with its
gate, both kernels of adapters alone, all as a compiled layer runs them, what that adds, and reading
A and B. With 0 adapters the tokens have none and the kernels run.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from models.kernels.products.add_adapters import add_adapters
from models.ops.products.adapted_linear import product_or_addends
from models.ops.products.linear import linear
from models.ops.products.norm_linear import gated_linear
from tests.bench.kernels import BYTES_PER_US, CACHE_BYTES, microseconds
from tests.bench.machine import commit, machine, versions

PRODUCTS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
"""Inputs, and outputs of each part."""
TOKENS = (1, 8, 32, 64, 128, 512, 2048)
NUM_SLOTS = 16
ROUNDS = 4
COLUMNS = ("product", "kernels", "all", "added", "reads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A layer's product and its adapters, of T tokens; see models.ops.products.add_adapters."""

    x: torch.Tensor
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[int, ...]
    slots: torch.Tensor

    @property
    def is_gated(self) -> bool:
        """Whether a gate follows."""
        return len(self.parts) == 2

    def multiply(self) -> torch.Tensor:
        """Runs the layer without adapters."""
        return (gated_linear if self.is_gated else linear)(self.x, self.weight, None)

    def add(self, product: torch.Tensor, *, is_beside: bool = False) -> torch.Tensor:
        """Runs both kernels."""
        adapters = self.a, self.b, self.parts, self.slots
        return add_adapters(product, self.x, *adapters, is_gated=self.is_gated, is_beside=is_beside)

    def run(self) -> torch.Tensor:
        """Runs the layer with adapters."""
        product, is_late = product_or_addends(self.x, self.weight, None, None)
        return self.add(product, is_beside=is_late)


def make_products(name: str, rank: int, num_tokens: int, count: int) -> list[Product]:
    """Returns products of as many layers as the second-level cache cannot hold."""
    num_inputs, parts = PRODUCTS[name]
    num_outputs, num_inner = sum(parts), len(parts) * rank
    factor_bytes = 2 * max(1, count) * min(num_inner * num_inputs, num_outputs * rank)
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    tokens = torch.arange(num_tokens, device="cuda")
    slots = tokens % count + 1 if count else torch.zeros_like(tokens)
    # Three do not fit into the cache, and weights take most of the memory.
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
def measure(name: str, rank: int, num_tokens: int, count: int) -> dict[str, float]:
    """Returns a row of the table."""
    products = make_products(name, rank, num_tokens, count)
    bare = [linear(each.x, each.weight, None) for each in products]
    adding = [partial(each.add, product) for each, product in zip(products, bare, strict=True)]
    product = microseconds([each.multiply for each in products], ROUNDS)
    whole = microseconds([each.run for each in products], ROUNDS)
    factor_bytes = 2 * count * (products[0].a[0].numel() + products[0].b[0].numel())
    return {
        "product": product,
        "kernels": microseconds(adding, ROUNDS),
        "all": whole,
        "added": whole - product,
        "reads": factor_bytes / BYTES_PER_US,
    }


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    print(f"{'':>24}" + "".join(f"{each:>9}" for each in COLUMNS), flush=True)
    for name in PRODUCTS:
        for num_tokens in options.tokens:
            for count in options.adapters:
                if count > num_tokens:
                    continue
                row = measure(name, options.rank, num_tokens, count)
                label = f"{name} {num_tokens} x {count}"
                rows[label] = row
                print(f"{label:>24}" + "".join(f"{row[each]:9.2f}" for each in COLUMNS), flush=True)
    if options.json is not None:
        facts = {"commit": commit(), "machine": machine(), "versions": versions()}
        options.json.write_text(json.dumps({**facts, "rank": options.rank, "rows": rows}))


if __name__ == "__main__":
    main()
