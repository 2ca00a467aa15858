"""Tries the tiles of products of few tokens on the shapes of known models.

    python -m tests.bench.skinny_linear [--tokens 1 2 8 16] [--best 4] [--json out.json]

Prints the fastest tiles of each shape beside torch's product and the time of reading the weights,
microseconds a product, with the norm that is fused or a kernel of its own after it, inside a CUDA
graph over weights that the second-level cache cannot hold.
models/kernels/products/linear_configurations.py is written from what it prints.
"""

import argparse
import json
import multiprocessing
import os
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from models.kernels.products.matrix_linear import matrix_linear
from models.kernels.products.vector_linear import vector_linear
from models.kernels.tuning.tiles import MatrixTiles, VectorTiles
from models.ops.elementwise.rms_norm import add_rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from tests.bench.kernels import BYTES_PER_US, copies, microseconds

MAX_SHARED_BYTES = 224 * 1024
VECTOR = [
    (1, 4096, 4), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (2, 4096, 4), (2, 4096, 8), (4, 512, 2),
    (4, 1024, 2), (4, 1024, 4), (4, 2048, 4), (4, 2048, 8), (4, 4096, 8), (8, 512, 2),
    (8, 1024, 4), (8, 2048, 4), (8, 2048, 8), (8, 4096, 8), (16, 1024, 4),
]  # fmt: skip
MATRIX = [
    (64, 64, 8), (64, 128, 3), (64, 128, 4), (64, 128, 6), (64, 128, 9), (64, 256, 2), (64, 256, 3),
    (64, 256, 4), (64, 256, 6), (128, 128, 2), (128, 128, 3), (128, 128, 5),
]  # fmt: skip
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A product of a model: its name, the sizes of result and input, and its fusions."""

    name: str
    num_outputs: int
    num_inputs: int
    has_norm: bool = False
    is_gated: bool = False
    has_residual: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_outputs * (2 if self.is_gated else 1)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.num_inputs * 2


def of_model(name, hidden, inner, attended, projected, vocab):
    return [
        Shape(name=f"{name} qkv", num_outputs=projected, num_inputs=hidden, has_norm=True),
        Shape(name=f"{name} o", num_outputs=hidden, num_inputs=attended, has_residual=True),
        Shape(
            name=f"{name} gate_up", num_outputs=inner, num_inputs=hidden, has_norm=True,
            is_gated=True,
        ),
        Shape(name=f"{name} down", num_outputs=hidden, num_inputs=inner, has_residual=True),
        Shape(name=f"{name} head", num_outputs=vocab, num_inputs=hidden),
    ]  # fmt: skip


SHAPES = {
    "8B": of_model("8B", 4096, 12288, 4096, 6144, 151936),
    "0.6B": of_model("0.6B", 1024, 3072, 2048, 4096, 151936),
}


def candidates(shape, num_tokens):
    """Yields the tiles that a shape can have."""
    if num_tokens <= 2:
        for rows, columns, warps in VECTOR:
            if columns <= shape.num_inputs:
                yield VectorTiles(rows=rows, columns=columns, num_warps=warps)
        return
    padded = max(8, 1 << (num_tokens - 1).bit_length())
    for rows, columns, stages in MATRIX:
        num_bytes = (rows + padded) * columns * 2 * stages
        for splits in SPLITS if shape.has_residual else (1,):
            if num_bytes <= MAX_SHARED_BYTES and columns * splits * 2 <= shape.num_inputs:
                yield MatrixTiles(
                    tokens=padded, rows=rows, columns=columns, num_stages=stages, splits=splits
                )


class Inputs:
    """Weights and inputs of one shape."""

    def __init__(self, shape, num_tokens, num_copies):
        def draw(*size):
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

        self.shape = shape
        self.weights = [
            draw(shape.num_rows, shape.num_inputs) * shape.num_inputs**-0.5
            for _ in range(num_copies)
        ]
        self.x = draw(num_tokens, shape.num_inputs)
        self.gain = draw(shape.num_outputs if shape.has_residual else shape.num_inputs)
        self.residual = draw(num_tokens, shape.num_outputs) if shape.has_residual else None

    def ours(self, weight, tiles):
        """Runs our kernel; with the norm after it if that is a kernel of its own."""
        gain, is_gated = self.gain, self.shape.is_gated
        if isinstance(tiles, MatrixTiles):
            output = matrix_linear(self.x, weight, None, tiles, is_gated=is_gated)
            if self.residual is not None:
                add_rms_norm(output, self.residual, gain, 1e-6)
            return
        vector_linear(
            self.x, weight, None, tiles,
            norm_weight=gain if self.shape.has_norm else None, eps=1e-6, is_gated=is_gated,
            residual=self.residual, output=self.residual,
        )  # fmt: skip

    def theirs(self, weight):
        """Runs torch's product and our other kernels."""
        output = torch.nn.functional.linear(self.x, weight)
        if self.shape.is_gated:
            silu_and_mul(output)
        if self.residual is not None:
            add_rms_norm(output, self.residual, self.gain, 1e-6)


def compile_share(jobs):
    """Compiles a share of the kernels, so that the disk cache has them."""
    for shape, num_tokens, tiles in jobs:
        inputs = Inputs(shape, num_tokens, 1)
        try:
            inputs.ours(inputs.weights[0], tiles)
        except OutOfResources as error:
            print(shape.name, tiles, error, flush=True)
    torch.cuda.synchronize()


def compile_all(jobs):
    workers = min(14, os.cpu_count())
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=compile_share, args=(jobs[index::workers],))
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def short(tiles):
    values = asdict(tiles)
    values.pop("tokens", None)
    kind = "v" if isinstance(tiles, VectorTiles) else "m"
    return kind + ",".join(str(value) for value in values.values())


def sweep(shape, num_tokens, best):
    """Prints and returns the fastest tiles of a shape."""
    inputs = Inputs(shape, num_tokens, copies(shape.num_bytes, 48))
    rounds = 1 if len(inputs.weights) >= 8 else 3

    def timed(call):
        return microseconds([lambda w=w: call(w) for w in inputs.weights], rounds)

    found = []
    for tiles in candidates(shape, num_tokens):
        try:
            found.append((timed(lambda w, t=tiles: inputs.ours(w, t)), short(tiles), tiles))
        except OutOfResources as error:
            print(shape.name, tiles, error, flush=True)
    found.sort(key=lambda entry: entry[0])
    theirs = timed(inputs.theirs)
    print(
        f"{shape.name:13} T {num_tokens:>2} floor {shape.num_bytes / BYTES_PER_US:6.2f} "
        f"torch {theirs:6.2f} | " + "; ".join(f"{us:.2f} {name}" for us, name, _ in found[:best]),
        flush=True,
    )
    return found, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--best", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs = [
        (shape, num_tokens, tiles)
        for model, num_tokens in product(options.models, options.tokens)
        for shape in SHAPES[model]
        for tiles in candidates(shape, num_tokens)
    ]
    compile_all(jobs)
    print(f"{len(jobs)} compiled", flush=True)
    record = []
    for model, num_tokens in product(options.models, options.tokens):
        for shape in SHAPES[model]:
            found, theirs = sweep(shape, num_tokens, options.best)
            torch.cuda.empty_cache()
            record.append(
                {
                    "shape": shape.name,
                    "tokens": num_tokens,
                    "torch_us": theirs,
                    "found": [(us, name) for us, name, _ in found],
                }
            )
    if options.json:
        options.json.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
