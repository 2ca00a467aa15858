"""The tables that tests.bench.tune measures: their rows, the tiles to try, and what is timed."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf

import torch

from models.kernels.experts.moe import apply_experts, route
from models.kernels.tuning.tiles import (
    AttentionTiles,
    MatrixTiles,
    StateTiles,
    Tiles,
    VectorTiles,
)
from tests.bench import experts, kernels, recurrence, shared_prefixes
from tests.support.attention_case import Heads
from tests.support.moe_case import make_logits

MAX_SHARED_BYTES = 224 * 1024
Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A table to be filled.

    name: a field of Tables, or a constant of tuning/hopper.py.
    points: by a row's key, the sizes that are timed for it.
    candidates: maps a key and the row's tiles to the tiles to try besides.
    calls: maps a key and a size to launches of the kernel that take the table's tiles.
    """

    name: str
    points: Mapping[Hashable, Sequence[Hashable]]
    candidates: Callable[[Hashable, object], Iterable[object]]
    calls: Callable[[Hashable, Hashable], Calls]


def vectors(key: Hashable, old: object) -> Iterator[VectorTiles | None]:
    """Yields tiles of scalar products, and None for torch's."""
    yield None
    for rows, columns, warps in product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8, 16)):
        # From 8 to 64 elements of a thread.
        if 8 <= rows * columns // (32 * warps) <= 64:
            yield VectorTiles(rows=rows, columns=columns, num_warps=warps)


def matrices(tokens: int, old: object) -> Iterator[MatrixTiles]:
    """Yields tiles of tensor cores for up to `tokens` tokens."""
    for rows, columns, stages in product((64, 128), (64, 128, 256), (2, 3, 4, 6, 8)):
        if (rows + tokens) * columns * 2 * stages <= MAX_SHARED_BYTES:
            yield MatrixTiles(tokens=tokens, rows=rows, columns=columns, num_stages=stages)


def varied(**values: Sequence[int]) -> Callable[[Hashable, Tiles], Iterator[Tiles]]:
    """Returns a function that yields tiles with all combinations of these values."""

    def tiles_of(key: Hashable, old: Tiles) -> Iterator[Tiles]:
        for chosen in product(*values.values()):
            tiles = replace(old, **dict(zip(values, chosen, strict=True)))
            # Held keys are whole tiles.
            if getattr(tiles, "held_keys", 0) % getattr(tiles, "keys", 1) == 0:
                yield tiles

    return tiles_of


def both(
    tiles_of: Callable[[Hashable, Tiles], Iterable[Tiles]],
) -> Callable[[Hashable, tuple[Tiles, Tiles]], Iterator[tuple[Tiles, Tiles]]]:
    """Returns a function that varies the tiles of gate and up, or those of down."""

    def pairs_of(key: Hashable, old: tuple[Tiles, Tiles]) -> Iterator[tuple[Tiles, Tiles]]:
        gate_up, down = old
        yield from ((tiles, down) for tiles in tiles_of(key, gate_up))
        yield from ((gate_up, tiles) for tiles in tiles_of(key, down))

    return pairs_of


def product_calls(key: Hashable, size: tuple[int, int, int, bool]) -> Calls:
    """Returns products, by tokens, outputs, inputs and whether gated."""
    return kernels.linear_calls(*size)[0]


def decode_calls(key: Hashable, size: tuple[int, int]) -> Calls:
    """Returns decode attention of single tokens, by requests and tokens of each."""
    heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
    return kernels.decode_calls(heads, *size, has_fp8_cache=False)[0]


def prefix_calls(key: tuple[int, int], size: tuple[int, int]) -> Calls:
    """Returns attention to shared keys alone, by requests and keys."""
    return shared_prefixes.prefix_calls(*size, has_fp8_cache=key[0] == 1)


def prefix_tiles(key: Hashable, old: AttentionTiles) -> Iterator[AttentionTiles]:
    """Yields tiles of more keys, whose programs fill a multiprocessor, and of fewer."""
    for stages in (2, 3):
        yield replace(old, keys=128, num_warps=8, num_stages=stages, num_programs=132)
    yield replace(old, keys=32, num_stages=5)


def chunk_calls(key: tuple[int, int], size: tuple[int, int, int]) -> Calls:
    """Returns attention of chunks, by requests, tokens of a chunk and tokens before it."""
    heads = Heads(num_heads=32, num_kv_heads=8, head_dim=key[1])
    return kernels.prefill_calls(heads, *size)[0]


def expert_calls(model: str, key: Hashable, num_tokens: int) -> Calls:
    """Returns the experts of two layers of a model of tests.bench.experts."""
    kind, shape, routing = experts.MODELS[model]
    logits, bias = make_logits(num_tokens, routing, num_experts=shape["num_experts"], device="cuda")
    weights, ids = route(logits, bias, routing)
    x = torch.randn(num_tokens, shape["hidden"], device="cuda").bfloat16()
    layers = (experts.make_layer(kind, shape, seed) for seed in range(2))
    return [partial(apply_experts, x, weights, ids, layer) for layer in layers]


def state_calls(key: Hashable, num_requests: int) -> Calls:
    """Returns steps of the gated delta rule, of Qwen3.5-35B-A3B."""
    cases = recurrence.cases_of("gdn", [1] * num_requests, num_slots=1)
    output = cases[0].run()
    return [partial(case.run_into, output) for case in cases]


def states(key: Hashable, old: object) -> Iterator[StateTiles]:
    """Yields tiles of recurrent states."""
    for columns, warps in product((16, 32, 64), (1, 2, 4)):
        yield StateTiles(columns=columns, num_warps=warps)


_CHUNK = varied(rows=(32, 64, 128), keys=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3))
_EXPERT_TOKENS = {16: [64], 32: [200], 64: [384], 128: [1024, 4096]}
"""Tokens of which 128 experts, 8 of each, have tiles of that height."""
_FEW_TOKENS = {
    tokens: [(tokens, 4096, 4096, False), (tokens, 1024, 2048, False)] for tokens in (8, 16, 32, 64)
}

TUNED = {
    each.name: each
    for each in (
        Tuned(
            name="vectors",
            points={
                (1, False, inf, 2047): [(1, 4096, 1024, False), (1, 151936, 1024, False)],
                (2, False, inf, 2047): [(2, 4096, 1024, False), (2, 151936, 1024, False)],
                (2, True, inf, 2047): [(1, 3072, 1024, True), (2, 3072, 1024, True)],
                (2, True, inf, 4095): [(1, 1024, 2048, False), (2, 1024, 3072, False)],
                (1, True, 5120, inf): [(1, 4096, 4096, False), (1, 4096, 12288, False)],
                (1, True, inf, inf): [(1, 6144, 4096, False), (1, 12288, 4096, True)],
                (2, True, 5120, inf): [(2, 4096, 4096, False), (2, 4096, 12288, False)],
                (2, False, 8192, inf): [(2, 6144, 4096, False)],
                (2, True, inf, inf): [(2, 12288, 4096, True)],
            },
            candidates=vectors,
            calls=product_calls,
        ),
        Tuned(name="MATRICES", points=_FEW_TOKENS, candidates=matrices, calls=product_calls),
        Tuned(
            name="GATED_MATRICES",
            points={
                tokens: [(tokens, 12288, 4096, True), (tokens, 3072, 1024, True)]
                for tokens in (8, 16, 32, 64)
            },
            candidates=matrices,
            calls=product_calls,
        ),
        Tuned(
            name="single_tokens",
            points={
                (64,): [(3, 256), (8, 704), (8, 4096)],
                (216,): [(12, 704), (24, 704), (24, 4096)],
                (256,): [(32, 256), (32, 4096)],
                (512,): [(64, 704), (64, 4096)],
                (inf,): [(128, 704), (256, 704)],
            },
            candidates=varied(
                keys=(16, 32, 64, 128), num_warps=(1, 2, 4, 8), num_stages=(2, 3, 5),
                num_dealt=(256, 384, 512),
            ),
            calls=decode_calls,
        ),
        Tuned(
            name="prefixes",
            points={(size, 128): [(8, 3008), (48, 3008), (48, 16000)] for size in (1, 2)},
            candidates=prefix_tiles,
            calls=prefix_calls,
        ),
        Tuned(
            name="first_chunk",
            points={(2, dim): [(16, 512, 0), (1, 8192, 0)] for dim in (64, 128, 256)},
            candidates=_CHUNK,
            calls=chunk_calls,
        ),
        Tuned(
            name="later_chunk",
            points={(2, dim): [(1, 2048, 6144), (32, 4, 4096)] for dim in (64, 128, 256)},
            candidates=_CHUNK,
            calls=chunk_calls,
        ),
        Tuned(
            name="grouped_experts",
            points=_EXPERT_TOKENS,
            candidates=both(
                varied(columns=(64, 128), depth=(64, 128), num_warps=(4, 8), num_stages=(2, 3, 4))
            ),
            calls=partial(expert_calls, "Qwen3-30B-A3B"),
        ),
        Tuned(
            name="fp8_experts",
            points=_EXPERT_TOKENS,
            candidates=both(
                varied(columns=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4, 5))
            ),
            calls=partial(expert_calls, "Qwen3-30B-A3B fp8"),
        ),
        Tuned(
            name="mxfp4_experts",
            points={16: [32], 32: [96], 64: [192], 128: [1024]},
            candidates=varied(
                weight_rows=(64, 128), depth=(64, 128), num_warps=(4, 8), num_stages=(2, 3, 4)
            ),
            calls=partial(expert_calls, "gpt-oss-20b mxfp4"),
        ),
        Tuned(
            name="delta_steps",
            points={(7,): [1, 4], (inf,): [8, 64]},
            candidates=states,
            calls=state_calls,
        ),
    )
}  # fmt: skip
