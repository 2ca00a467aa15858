"""Checks and times products with weights of 8 and 4 bits against bfloat16's.

    python -m tests.bench.quantized_products [--tokens 1,8,64] [--json out.json]

Each figure is the median of replays of a graph of launches that walk over more weights than the
second-level cache holds. GB/s counts the bytes of weights and scales, as stored. The error is that
of a product against the one in float32 of the same weights, relative to its norm; it includes the
rounding of activations where there is one. The floor is the larger of reading those bytes at 4,482
GB/s and an H200's arithmetic, for rounded activations taken as twice its bfloat16.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch

from models.number_formats import BLOCK, FP8, FP8_MAX
from models.operands.packed_weights import packed_values
from models.ops.products.activation_rounding import rounds_activations
from models.ops.products.fp8_linear import dequantized
from models.ops.products.linear import linear
from models.ops.products.norm_linear import gated_linear
from models.ops.products.packed_linear import packed_linear
from tests.bench.kernels import BYTES_PER_US, FLOP_PER_US, copies, microseconds
from tests.support.packed_quantization import quantize_packed

SHAPES = {
    "8B qkv": (4096, 6144, False),
    "8B o": (4096, 4096, False),
    "8B gate_up": (4096, 12288, True),
    "8B down": (12288, 4096, False),
    "70B o": (8192, 8192, False),
    "odd": (1056, 1000, False),
}
"""Inputs, outputs, and whether a gate follows."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 2048)
Tensors = tuple[torch.Tensor | None, ...]

PACKED: Mapping[str, Callable[[torch.Tensor], Tensors]] = {
    "int4 g128": partial(quantize_packed, group=128),
    "int4 g32 zeros": partial(quantize_packed, group=32, has_zeros=True),
    "mxfp4": partial(quantize_packed, group=32, is_float=True),
    "nvfp4": partial(quantize_packed, group=16, is_float=True),
    "int8 g128": partial(quantize_packed, group=128, num_bits=8),
    "int8 g32 zeros": partial(quantize_packed, group=32, has_zeros=True, num_bits=8),
}
FORMATS = ("bf16", "fp8 rows", "fp8 blocks", *PACKED)


def quantized(values: torch.Tensor, name: str) -> Tensors:
    """Returns a weight in a format: the weight, its scales and zeros."""
    if name == "bf16":
        return values, None, None
    if name in PACKED:
        return PACKED[name](values)
    exact = values.float()
    if name == "fp8 rows":
        scale = exact.abs().amax(1, keepdim=True) / FP8_MAX
        return (exact / scale).to(FP8), scale, None
    # One scale fits all blocks of random numbers.
    scale = torch.full([-(-size // BLOCK) for size in values.shape], 5 / FP8_MAX / 64)
    scale = scale.to(values.device)
    return (exact / scale[0, 0]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale, None


def values_of(weight: Tensors, name: str) -> torch.Tensor:
    """Returns a weight's values in float32."""
    stored, scale, zero = weight
    assert stored is not None, "a format has a weight"
    if scale is None:
        return stored.float()
    if name in PACKED:
        return packed_values(stored, scale, zero, torch.float32)
    return dequantized(stored, scale, torch.float32)


def multiplied(x: torch.Tensor, weight: Tensors, name: str, *, is_gated: bool) -> torch.Tensor:
    """Returns a product through the operator that layers call."""
    stored, scale, zero = weight
    assert stored is not None, "a format has a weight"
    if name in PACKED:
        assert scale is not None, "a packed weight has scales"
        return packed_linear(x, stored, scale, zero, None, is_gated)
    return (gated_linear if is_gated else linear)(x, stored, None, scale)


def measure(shape: tuple[int, int, bool], num_tokens: int, name: str) -> dict[str, float]:
    """Returns a product's error, microseconds, floor and GB/s."""
    size, num_outputs, is_gated = shape
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    draw = partial(torch.randn, device="cuda", generator=generator)
    x = draw(num_tokens, size).bfloat16()
    num_rows = num_outputs * (2 if is_gated else 1)
    first = quantized((draw(num_rows, size) / 64).bfloat16(), name)
    num_bytes = sum(each.nbytes for each in first if each is not None)
    weights = [first]
    for _ in range(copies(num_bytes) - 1):
        weights.append(tuple(None if each is None else each.clone() for each in first))
    exact = x.float() @ values_of(first, name).t()
    if is_gated:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    torch.cuda.synchronize()
    error = (multiplied(x, first, name, is_gated=is_gated).float() - exact).norm() / exact.norm()
    calls: list[Callable[[], object]] = [
        partial(multiplied, x, weight, name, is_gated=is_gated) for weight in weights
    ]
    us = microseconds(calls)
    is_rounded = name.startswith("fp8") and rounds_activations(num_tokens, x.dtype)
    flop = 2 * num_tokens * size * num_rows / (2 if is_rounded else 1)
    floor = max(num_bytes / BYTES_PER_US, flop / FLOP_PER_US)
    return {"error": float(error), "us": us, "floor_us": floor, "gb_s": num_bytes / us / 1e3}


def main() -> None:
    """Prints a table, one line a product; ends with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, wrong = [], 0
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{'product':11} {'format':15} {'tokens':>6} {'us':>8} {'of floor':>8} GB/s   error")
    for (layer, shape), name in product(SHAPES.items(), FORMATS):
        for num_tokens in map(int, options.tokens.split(",")):
            figures = measure(shape, num_tokens, name)
            rounds = name.startswith("fp8") and rounds_activations(num_tokens, torch.bfloat16)
            is_wrong = not figures["error"] < (0.05 if rounds else 0.01)
            wrong += is_wrong
            print(
                f"{layer:11} {name:15} {num_tokens:6} {figures['us']:8.2f} "
                f"{figures['us'] / figures['floor_us']:8.2f} {figures['gb_s']:6.0f} "
                f"{figures['error']:.4f}{' WRONG' if is_wrong else ''}",
                flush=True,
            )
            results.append({"layer": layer, "format": name, "tokens": num_tokens, **figures})
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
