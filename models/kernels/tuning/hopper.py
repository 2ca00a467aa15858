"""Tables of GPUs of compute capability 9.0, measured on H100 and H200.

TABLES are of kernels that run on any GPU, the others of kernels for Hopper's tensor cores and copy
engine. Each says its card and month; docs/history/tiles.md has the times of tiles that won and
lost, docs/tuning.md how to measure again.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import torch

from models.kernels.tuning.table import Tables
from models.kernels.tuning.tiles import (
    AttentionTiles,
    BlockTiles,
    ExpandedTiles,
    ExpertTiles,
    FewTokenTiles,
    Forms,
    FP8ExpertTiles,
    GroupedTiles,
    MatrixTiles,
    MXFP4Tiles,
    PackedTiles,
    StateTiles,
    VectorTiles,
    WideFP8Tiles,
    WideTiles,
)

CAPABILITY = (9, 0)

# Products of few tokens: Qwen3-8B and Qwen3-0.6B (H200, 2026-11), with their norms, then in whole
# steps: rings that are best alone leave too little room for the neighbours'.

_VECTORS = (
    ((1, False, inf, 2047), VectorTiles(rows=4, columns=1024, num_warps=2)),
    ((2, False, inf, 2047), VectorTiles(rows=4, columns=1024, num_warps=4)),
    ((2, True, inf, 2047), VectorTiles(rows=4, columns=512, num_warps=2)),
    ((2, True, inf, 4095), VectorTiles(rows=2, columns=2048, num_warps=4)),
    ((1, True, 5120, inf), VectorTiles(rows=8, columns=2048, num_warps=4)),
    ((1, True, inf, inf), VectorTiles(rows=4, columns=4096, num_warps=8)),
    ((2, True, 5120, inf), VectorTiles(rows=4, columns=2048, num_warps=8)),
    ((2, False, 8192, inf), VectorTiles(rows=4, columns=512, num_warps=2)),
    ((2, True, inf, inf), VectorTiles(rows=4, columns=2048, num_warps=8)),
)
_FP8_VECTORS = (
    ((False, 5120, 2047), VectorTiles(rows=4, columns=1024, num_warps=4)),
    ((False, inf, 2047), VectorTiles(rows=8, columns=1024, num_warps=4)),
    ((False, 5120, 8191), VectorTiles(rows=4, columns=2048, num_warps=8)),
    ((False, 5120, inf), VectorTiles(rows=4, columns=4096, num_warps=16)),
    ((False, inf, inf), VectorTiles(rows=16, columns=2048, num_warps=8)),
    ((True, inf, 4095), VectorTiles(rows=4, columns=1024, num_warps=4)),
    ((True, inf, inf), VectorTiles(rows=4, columns=4096, num_warps=8)),
)
_FP8_BLOCKS = (
    ((16,), BlockTiles(rows=16, columns=32, num_warps=4, num_stages=5)),
    ((32,), BlockTiles(rows=32, columns=32, num_warps=4, num_stages=5)),
    ((64,), BlockTiles(rows=64, columns=64, num_warps=4, num_stages=4)),
    ((inf,), BlockTiles(rows=128, columns=128, num_warps=8, num_stages=3)),
)
MATRICES = {
    8: MatrixTiles(tokens=8, rows=64, columns=256, num_stages=4),
    16: MatrixTiles(tokens=16, rows=64, columns=256, num_stages=4),
    32: MatrixTiles(tokens=32, rows=64, columns=256, num_stages=3),
    64: MatrixTiles(tokens=64, rows=64, columns=256, num_stages=3),
}
"""Tiles by tokens. Such products make few programs, with long rings; splits are chosen by size."""
GATED_MATRICES = {
    8: MatrixTiles(tokens=8, rows=64, columns=128, num_stages=4),
    16: MatrixTiles(tokens=16, rows=64, columns=128, num_stages=3),
    32: MatrixTiles(tokens=32, rows=64, columns=128, num_stages=3),
    64: MatrixTiles(tokens=64, rows=64, columns=128, num_stages=2),
}
"""Tiles of gated products by tokens, which make many programs, three per multiprocessor."""
FEW_OUTPUTS = MatrixTiles(tokens=8, rows=64, columns=256, num_stages=2, groups=3)
"""Of few outputs (H200, 2026-11-26). More programs of fewer tokens are faster, though each reads
the whole weight.
"""

# Products of more tokens: relative time of a tile on every multiprocessor (H200, 2026-11, shapes of
# Qwen3-8B and Qwen3-0.6B, against torch's, alone and in whole steps).

ONE_GROUP = WideTiles(groups=1, tokens=128, slots=7)
TWO_GROUPS = WideTiles(groups=2, tokens=128, slots=6)
THREE_GROUPS = WideTiles(groups=3, tokens=128, slots=5)
MOST_TOKENS = WideTiles(groups=3, tokens=256, slots=3)
_TWO_GROUPS_OF_MANY = WideTiles(groups=2, tokens=256, slots=4)
WIDE = {ONE_GROUP: 0.55, TWO_GROUPS: 0.75, THREE_GROUPS: 1.0, MOST_TOKENS: 1.95}
WIDE_HALF_TILE = {THREE_GROUPS: 1.0}
WIDE_MANY_TOKENS = {_TWO_GROUPS_OF_MANY: 1.27, MOST_TOKENS: 1.85}
WIDE_FEW_TOKENS = {ONE_GROUP: 0.55, TWO_GROUPS: 0.78, **WIDE_HALF_TILE, **WIDE_MANY_TOKENS}
"""These three in batch-invariant mode, of products in one part; fitted to 53 products of 256 to
8192 tokens: one takes 4 % longer than in the fastest tiles, the others at most 2 %.
"""
WIDE_SPLIT = {ONE_GROUP: 0.55, WideTiles(groups=1, tokens=256, slots=5): 0.7}
"""Costs where programs of their own sum the parts."""
WIDE_PARTS = {
    2: {TWO_GROUPS: 0.75, _TWO_GROUPS_OF_MANY: 1.4},
    4: {TWO_GROUPS: 0.75},
}
"""The same by the parts of a program. 256 tokens' sums of earlier parts are in memory: with four
parts that costs 1.65, more than two waves of tiles of 128.
"""
FP8_TWO_PRODUCTS = WideFP8Tiles(rows=128, products=2, slots=4)
"""Tiles with a relative time of 1."""
FP8_MOST_ROWS = WideFP8Tiles(rows=128, products=1, slots=6)
FP8_WIDE = {WideFP8Tiles(rows=64, products=1, slots=8): 0.37, FP8_MOST_ROWS: 0.53}

# Products with packed weights: Llama-3.1-8B in groups of 128 (2026-11; 4 bits on an H200, 8 bits on
# an H100).

PackedCosts = dict[MatrixTiles | PackedTiles, float]
PACKED_GATED: Mapping[int, PackedCosts] = {
    4: {
        PackedTiles(tokens=128, groups=1, slots=6): 0.58,
        PackedTiles(tokens=128, groups=2, slots=5): 0.8,
        PackedTiles(tokens=128, groups=3, slots=5): 1.07,
        PackedTiles(tokens=256, groups=2, slots=3): 1.4,
    },
    8: {
        PackedTiles(tokens=128, groups=1, slots=5): 0.64,
        PackedTiles(tokens=128, groups=2, slots=4): 0.88,
        PackedTiles(tokens=128, groups=3, slots=3): 1.17,
        PackedTiles(tokens=256, groups=2, slots=2): 1.5,
    },
}
"""Microseconds of 128 inputs of a tile on every multiprocessor, by bits of the weight.

Products of 80 to 8192 tokens take within 10 % of that, of 8 bits within 15 %, but for long ones in
few programs, which are up to 15 % faster.
"""
PACKED_PAIR = MatrixTiles(tokens=64, rows=64, columns=256, num_stages=2, groups=2)
"""Tiles whose groups share out the inputs."""
PACKED: Mapping[int, PackedCosts] = {
    4: PACKED_GATED[4] | {PackedTiles(tokens=128, groups=2, slots=5): 0.78, PACKED_PAIR: 0.28},
    8: PACKED_GATED[8] | {PACKED_PAIR: 0.35},
}
"""Tiles of products without a gate."""
PACKED_MOST_SPLITS = 4
PACKED_SPLIT: Mapping[int, PackedCosts] = {
    bits: PACKED[bits]
    | {
        replace(PACKED_PAIR, groups=1, splits=count): cost
        for count in range(1, PACKED_MOST_SPLITS + 1)
    }
    for bits, cost in {4: 0.57, 8: 0.68}.items()
}
"""The same of products that may be split; of one warp group, two programs run at once (H100,
2026-11-26).
"""
PACKED_GATED_FEW = {
    4: PackedTiles(tokens=64, groups=2, slots=4, programs=2),
    8: PackedTiles(tokens=64, groups=2, slots=3, programs=2),
}
"""Of gated products of 33 to 64 tokens with enough rows for every multiprocessor."""
PACKED_ALONE = {
    8: MatrixTiles(tokens=8, rows=64, columns=256, num_stages=4),
    16: MatrixTiles(tokens=16, rows=64, columns=256, num_stages=4),
    32: MatrixTiles(tokens=32, rows=64, columns=256, num_stages=3),
    64: MatrixTiles(tokens=64, rows=64, columns=256, num_stages=2),
}
"""Tiles by tokens, of programs of one warp group."""

# Decode attention: 32 heads, 8 kv heads of 128 (H200, 2026-11, `python -m tests.bench.kernels
# --only decode,fp8-decode`). Rows of heads of 512 are not measured: they are the largest tiles that
# fit shared memory.

_DECODE = {
    (2, 64): AttentionTiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 128): AttentionTiles(rows=16, keys=64, num_warps=4, num_stages=3),
    (2, 256): AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=3),
    (2, 512): AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 64): AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 128): AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 256): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=2),
    (4, 512): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
_PREFIXES = {
    (1, 64): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=3, num_programs=264),
    (1, 128): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=3, num_programs=264),
    (1, 256): AttentionTiles(rows=64, keys=64, num_warps=8, num_stages=2, num_programs=132),
    (1, 512): AttentionTiles(rows=32, keys=32, num_warps=8, num_stages=2, num_programs=132),
    (2, 64): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=3, num_programs=264),
    (2, 128): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=3, num_programs=264),
    (2, 256): AttentionTiles(rows=64, keys=64, num_warps=8, num_stages=2, num_programs=132),
    (2, 512): AttentionTiles(rows=32, keys=32, num_warps=8, num_stages=2, num_programs=132),
    (4, 64): AttentionTiles(rows=32, keys=32, num_warps=4, num_stages=2, num_programs=264),
    (4, 128): AttentionTiles(rows=32, keys=32, num_warps=4, num_stages=2, num_programs=264),
    (4, 256): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=2, num_programs=264),
    (4, 512): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=1, num_programs=264),
}
"""Not measured: a warpgroup's rows, and keys so that two programs of heads of up to 128 share a
multiprocessor. Larger heads have more threads, as transforming their queries takes registers."""
_LEAST_SHARED_BYTES = {1: 128 * 2**20, 2: 128 * 2**20, 4: 128 * 2**20}
"""In layers of Qwen3-8B in 16 bits, 7 x 3,008 tokens are 86 MB, which did not pay (26.0 us each its
own, 32.2 once), and 31 x 3,008 are 382 MB (91.5 and 44.3). With an FP8 cache 7 x 3,008 are 45 MB
(20.1 and 29.8), 31 x 3,008 are 197 MB (53.3 and 36.0), and 7 x 16,000 are 237 MB (60.5 and 50.8).
Others were not measured (H200, 2026-11; docs/kernels/attention.md)."""
_HELD = AttentionTiles(
    rows=16, keys=64, num_warps=4, num_stages=3, held_keys=128, num_dealt=352, least_part=128,
    most_splits=48, most_partials=384,
)  # fmt: skip
_EVEN = AttentionTiles(
    rows=16, keys=64, num_warps=4, num_stages=3, num_dealt=368, least_part=256, even_parts=True,
    starts_next_late=False,
)  # fmt: skip
_HALF = AttentionTiles(
    rows=16, keys=64, num_warps=8, num_stages=5, held_keys=64, num_programs=256, num_dealt=256,
    least_part=256, starts_next_late=False,
)  # fmt: skip
_WIDE = AttentionTiles(
    rows=16, keys=64, num_warps=4, num_stages=3, num_dealt=384, least_part=1024
)  # fmt: skip
_SHALLOW = AttentionTiles(
    rows=16, keys=16, num_warps=1, num_stages=3, num_dealt=512, least_part=1024
)  # fmt: skip
_SINGLE_TOKENS = (
    ((64,), _HELD), ((216,), _EVEN), ((256,), _HALF), ((512,), _WIDE), ((inf,), _SHALLOW)
)  # fmt: skip
"""Few programs hold the first keys of their part: these arrive while queries are computed. Then
four programs share a multiprocessor, or two that each have an equal part. Beyond that, single warps
lose least between tiles, and small tiles let most programs run at once.
"""
_WHOLE = AttentionTiles(
    rows=16, keys=128, num_warps=8, num_stages=5, held_keys=256, num_programs=128, least_part=256
)
_FLAT = (
    ((8,), AttentionTiles(rows=8, keys=64, num_warps=1, num_stages=2)),
    ((16,), AttentionTiles(rows=16, keys=32, num_warps=1, num_stages=5)),
    ((inf,), AttentionTiles(rows=32, keys=32, num_warps=4, num_stages=3)),
)
"""Keys are the rows of both products: see keys_of_8_bits. Larger groups take more registers."""
_FLAT_HELD = (
    (
        (8,),
        AttentionTiles(
            rows=8, keys=128, num_warps=4, num_stages=3, held_keys=128, most_partials=256
        ),
    ),
    (
        (32,),
        AttentionTiles(
            rows=8, keys=64, num_warps=2, num_stages=5, held_keys=64, num_dealt=512,
            most_splits=48, most_partials=512,
        ),
    ),
    (
        (64,),
        AttentionTiles(
            rows=8, keys=128, num_warps=2, num_stages=2, num_dealt=504, least_part=128,
            most_partials=512,
        ),
    ),
)  # fmt: skip
"""Four programs of the third share a multiprocessor, and all parts of 5 to 8 equal sequences of 8
heads run at once.
"""

# Chunks: 32 heads, 8 kv heads of 128 (H200, 2026-11, `python -m tests.bench.kernels --only
# prefill`).

_ANY_CHUNK = {
    (2, 512): AttentionTiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 64): AttentionTiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 128): AttentionTiles(rows=32, keys=32, num_warps=4, num_stages=2),
    (4, 256): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=1),
    (4, 512): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
_FIRST_CHUNK = {
    (2, 64): AttentionTiles(rows=128, keys=64, num_warps=8, num_stages=3),
    (2, 128): AttentionTiles(rows=128, keys=128, num_warps=8, num_stages=3),
    (2, 256): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=3),
    **_ANY_CHUNK,
}
_LATER_CHUNK = {
    (2, 64): AttentionTiles(rows=128, keys=64, num_warps=4, num_stages=3),
    (2, 128): AttentionTiles(rows=128, keys=64, num_warps=4, num_stages=3),
    (2, 256): AttentionTiles(rows=64, keys=32, num_warps=4, num_stages=2),
    **_ANY_CHUNK,
}
_INVARIANT = {
    (2, 64): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=2, is_exact=True),
    (2, 128): AttentionTiles(rows=64, keys=64, num_warps=4, num_stages=2, is_exact=True),
    (2, 256): AttentionTiles(rows=64, keys=32, num_warps=8, num_stages=2),
    (2, 512): AttentionTiles(rows=32, keys=32, num_warps=8, num_stages=2),
    (4, 64): AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 128): AttentionTiles(rows=16, keys=32, num_warps=4, num_stages=2),
    (4, 256): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=1),
    (4, 512): AttentionTiles(rows=16, keys=16, num_warps=4, num_stages=1),
}
HOPPER_CHUNK = {
    64: AttentionTiles(rows=128, keys=128, num_warps=4, num_stages=4),
    128: AttentionTiles(rows=128, keys=128, num_warps=4, num_stages=2),
    256: AttentionTiles(rows=128, keys=64, num_warps=4, num_stages=2),
}
"""Of hopper_attention, by head dimension; stages fill the shared memory (H200, 2026-11)."""
HOPPER_PARTS = {
    (torch.bfloat16, 64): replace(HOPPER_CHUNK[64], is_exact=True),
    (torch.bfloat16, 128): replace(HOPPER_CHUNK[128], is_exact=True),
    (torch.float16, 64): replace(HOPPER_CHUNK[64], keys=64, num_stages=8, is_exact=True),
    (torch.float16, 128): replace(HOPPER_CHUNK[128], keys=64, num_stages=4, is_exact=True),
}
"""The same in batch-invariant mode, by dtype and head dimension (H100, 2026-11).

Small weights lose bits in float16, so there each row must meet its highest scores as late as in
Tables.invariant: the keys of its tiles.
"""

# Experts: Qwen3-30B-A3B, GLM-4.5-Air, DeepSeek-V3 and gpt-oss-20b (H200 if no other card is named,
# 2026-11, `python -m tests.bench.experts`).

_ROUNDED_DOWN = FP8ExpertTiles(rows=64, columns=128, num_warps=4, num_stages=4)
_ROUNDED = FP8ExpertTiles(rows=64, columns=64, num_warps=4, num_stages=4), _ROUNDED_DOWN
FORMS_OF_4_BITS = Forms(
    experts_per_pair=4, heights=((8, 4), (16, 8), (32, 16), (64, 64), (128, 192), (256, 256))
)
"""Tiles of packed experts (H100, gpt-oss-20b and shorter last tiles)."""
FORMS_OF_8_BITS = Forms(
    experts_per_pair=6, heights=((8, 4), (16, 8), (32, 16), (64, 48), (128, 128))
)
"""Tiles of FP8 experts on tensor cores (H200)."""
_TWO_PROGRAMS = FewTokenTiles(
    tokens=8, groups=2, columns=128, slots=7, programs=2, most_inputs=2944, registers=(80, 88, 64)
)
_ONE_PROGRAM = FewTokenTiles(
    tokens=16, groups=4, columns=128, slots=6, programs=1, most_inputs=2304,
    registers=(96, 104, 64),
)  # fmt: skip
FEW_TOKEN_EXPERTS = {
    8: (_TWO_PROGRAMS,),
    16: (_ONE_PROGRAM,),
    32: (
        replace(_ONE_PROGRAM, tokens=32, slots=4),
        replace(_ONE_PROGRAM, tokens=32, columns=64, slots=4, most_inputs=2880),
    ),
}
"""By expert_forms.tile_rows; a product takes the first that has room for its inputs (H200,
gpt-oss-20b, and H100, Qwen3-30B-A3B in groups of 128; 2026-11-26).
"""
_LAST_TOKENS = {64: 16, 128: 64, 256: 64}
"""By height of the other tiles: about half of the last tiles have few tokens."""


def _experts(
    tokens: int,
    rows: int,
    columns: int,
    num_stages: int,
    num_warps: int = 4,
    *,
    max_registers: int | None = None,
) -> ExpertTiles:
    return ExpertTiles(
        tokens=tokens, rows=rows, columns=columns, num_stages=num_stages, num_warps=num_warps,
        # One program of 256 fills a multiprocessor, and no other keeps its cores busy.
        num_unpacked=2 if tokens >= 256 else 1,
        last_tokens=_LAST_TOKENS.get(tokens, tokens), max_registers=max_registers,
    )  # fmt: skip


_HIGH = _experts(128, 128, 64, 4, 8, max_registers=128)
EXPERTS_ALONE = _experts(8, 64, 256, 5)
"""For pairs computed alone."""
EXPERTS = {
    8: (_experts(8, 64, 256, 3), _experts(8, 64, 256, 3)),
    16: (_experts(16, 64, 128, 4), _experts(16, 64, 256, 3)),
    32: (_experts(32, 128, 128, 4, 8), _experts(32, 128, 128, 4, 8)),
    64: (_experts(64, 128, 128, 3, 8, max_registers=128), _experts(64, 128, 64, 4)),
    128: (_HIGH, _HIGH),
    256: (_HIGH, _experts(256, 128, 64, 4, 8)),
}
"""Of gate and up, and of down, by expert_forms.tile_rows (H200, gpt-oss-20b, 2026-11-26)."""

TABLES = Tables(
    vectors=_VECTORS,
    fp8_vectors=_FP8_VECTORS,
    fp8_blocks=_FP8_BLOCKS,
    decode=_DECODE,
    beside_chunks={
        head: replace(tiles, num_dealt=256, least_part=256) for head, tiles in _DECODE.items()
    },
    single_tokens=_SINGLE_TOKENS,
    whole=_WHOLE,
    most_whole_heads=16,
    held=_HELD,
    held_window=replace(_HELD, num_dealt=0, most_partials=1),
    most_window_pairs=256,
    broad=replace(_DECODE[2, 256], num_dealt=512),
    most_narrow_pairs=256,
    # With more registers two programs share a multiprocessor, not three.
    broad_8=replace(_DECODE[2, 256], registers=168, num_dealt=384, least_part=128),
    flat=_FLAT,
    flat_dealt=tuple(
        (most, replace(tiles, num_dealt=768 if most[0] <= 8 else 512, least_part=128))
        for most, tiles in _FLAT
    ),
    flat_held=_FLAT_HELD,
    flat_few=AttentionTiles(rows=16, keys=64, num_warps=2, num_stages=3, num_dealt=256),
    most_flat_pairs=32,
    prefixes=_PREFIXES,
    least_shared_bytes=_LEAST_SHARED_BYTES,
    narrow_queries=AttentionTiles(
        rows=16, keys=32, num_warps=1, num_stages=5, num_programs=1056, least_part=128,
        keys_as_rows=True,
    ),
    wide_queries=AttentionTiles(
        rows=64, keys=64, num_warps=4, num_stages=5, num_programs=264, least_part=128
    ),
    first_chunk=_FIRST_CHUNK,
    later_chunk=_LATER_CHUNK,
    expanded={
        2: ExpandedTiles(queries=128, keys=64, num_warps=8, num_stages=3),
        4: ExpandedTiles(queries=32, keys=32, num_warps=4, num_stages=1),
    },
    invariant=_INVARIANT,
    invariant_many=AttentionTiles(rows=16, keys=64, num_warps=2, num_stages=2, is_exact=True),
    many_pairs=256,
    invariant_most=AttentionTiles(rows=16, keys=16, num_warps=1, num_stages=3, is_exact=True),
    most_pairs=512,
    grouped_experts={
        16: (
            GroupedTiles(columns=64, depth=128, num_warps=4, num_stages=5),
            GroupedTiles(columns=64, depth=128, num_warps=4, num_stages=3),
        ),
        32: (
            GroupedTiles(columns=64, depth=64, num_warps=4, num_stages=3),
            GroupedTiles(columns=128, depth=64, num_warps=4, num_stages=3),
        ),
        64: (
            GroupedTiles(columns=64, depth=64, num_warps=4, num_stages=3),
            GroupedTiles(columns=128, depth=64, num_warps=4, num_stages=4),
        ),
        128: (
            GroupedTiles(columns=128, depth=64, num_warps=8, num_stages=4),
            GroupedTiles(columns=128, depth=64, num_warps=8, num_stages=3),
        ),
    },
    grouped_experts_alone=(
        GroupedTiles(columns=64, depth=64, num_warps=4, num_stages=4),
        GroupedTiles(columns=64, depth=256, num_warps=4, num_stages=2),
    ),
    grouped_experts_float=GroupedTiles(columns=32, depth=32, num_warps=4, num_stages=2),
    fp8_experts={
        16: (
            FP8ExpertTiles(rows=16, columns=64, num_warps=4, num_stages=4),
            FP8ExpertTiles(rows=16, columns=128, num_warps=4, num_stages=4),
        ),
        32: _ROUNDED,
        64: _ROUNDED,
        128: (FP8ExpertTiles(rows=128, columns=128, num_warps=8, num_stages=3), _ROUNDED_DOWN),
    },
    fp8_experts_alone=(
        (
            (1024,),
            (
                FP8ExpertTiles(rows=16, columns=32, num_warps=4, num_stages=5),
                FP8ExpertTiles(rows=16, columns=64, num_warps=4, num_stages=5),
            ),
        ),
        ((inf,), _ROUNDED),
    ),
    mxfp4_experts={
        16: MXFP4Tiles(rows=16, weight_rows=64, depth=128, num_warps=4, num_stages=4),
        32: MXFP4Tiles(rows=32, weight_rows=128, depth=128, num_warps=4, num_stages=3),
        64: MXFP4Tiles(rows=64, weight_rows=128, depth=128, num_warps=4, num_stages=3),
        128: MXFP4Tiles(rows=128, weight_rows=128, depth=64, num_warps=8, num_stages=3),
    },
    mxfp4_experts_alone=MXFP4Tiles(rows=16, weight_rows=64, depth=256, num_warps=4, num_stages=3),
    mxfp4_experts_float=MXFP4Tiles(rows=16, weight_rows=32, depth=128, num_warps=4, num_stages=2),
    # 32 heads of 128 (H200, 2026-11, `python -m tests.bench.recurrence`).
    delta_steps=(
        ((7,), StateTiles(columns=16, num_warps=1)),
        ((inf,), StateTiles(columns=64, num_warps=2)),
    ),
)  # fmt: skip
