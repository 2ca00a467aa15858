"""The kernels in Triton's interpreter, on the CPU; bfloat16 products are wrong there.

A process of their own, as the interpreter is chosen when a kernel is defined.
"""

import pytest

from tests.support.programs import run_interpreted

PLAIN_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.rotary import rotary
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.kernels.attention import attention
from models.ops.elementwise.local_embedding import local_embedding
from models.kernels.elementwise import local_embedding as shards
from models.kernels.elementwise import rms_norm as norms
from models.kernels.elementwise import rotary as turning
from models.kernels.elementwise import silu_and_mul as gate
from models.kernels.elementwise.add_gated import add_gated
from models.kernels.elementwise import gated_rms_norm as gated_norms
from models.kernels.elementwise import sigmoid_gate as factors
from models.ops.elementwise.gated_rms_norm import gated_rms_norm
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.kernels.tuning.tiles import VectorTiles
from models.kernels.attention.cache.slot_mapping import slot_mapping
from tests.support.attention_case import Heads, make_case, token_request
from tests.support.linear_case import OPTIONS, make_linear_case
from tests.support.tolerances import assert_rows_close

ODD = Heads(num_heads=6, num_kv_heads=2, head_dim=12)
CASES = [
    (([1] * 5, [5, 1, 0, 170, 16]), {}),
    (([1, 7, 40, 1], [5, 7, 170, 33]), {}),
    (([1, 0, 5, 0], [9, 0, 8, 0]), {}),
    (([33], [33]), {"block_size": 5}),
    (([1, 17], [9, 33]), {"has_rotation": False}),
    (([3, 1], [3, 1]), {"has_norm": False}),
    (([1, 7, 40, 1], [5, 7, 170, 99]), {"sliding_window": 33, "has_sinks": True}),
    (([1] * 4, [5, 1, 0, 170]), {"sliding_window": 33, "has_sinks": True}),
    (([1] * 5, [5, 1, 0, 170, 16]), {"soft_cap": 1.5, "scale": 0.4}),
    (([1, 7, 40, 1], [5, 7, 170, 33]), {"soft_cap": 0.7, "sliding_window": 33, "has_sinks": True}),
    (([1, 17], [9, 33]), {"soft_cap": 2.0, "scale": 1.0, "has_rotation": False}),
    (([1, 7, 40, 1], [5, 7, 170, 33]), {"images": [(1, 2, 6), (2, 132, 165), (2, 167, 170)]}),
    (([45, 1, 9], [45, 9, 60]), {"images": [(0, 3, 44), (2, 40, 60)], "sliding_window": 11}),
    # Chunks of positions, some of which begin with a query or within a prompt.
    (([1, 7, 40, 1], [5, 69, 170, 99]), {"sliding_window": -33, "has_sinks": True}),
    (([1] * 6, [5, 1, 0, 170, 33, 34]), {"sliding_window": -33}),
    (([1, 17], [9, 33]), {"sliding_window": -8, "has_rotation": False}),
]
# Cases take turns with types; both see each kernel. tests/gpu has all of both.
DTYPES = torch.float32, torch.float16
for number, (batch, options) in enumerate(CASES):
    dtype = DTYPES[number % 2]
    case = make_case(*batch, ODD, dtype=dtype, **options)
    exact = case.exact()
    case.leave_window()
    output = torch.full(case.q.shape, torch.nan, dtype=dtype)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform,
        case.sliding_window, case.sinks, case.scale or case.q.shape[2] ** -0.5, case.soft_cap,
        key_ends=case.key_ends,
    )
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    assert_rows_close(output[live], exact.run()[live])
    assert output[~live].count_nonzero() == 0
    assert_rows_close(case.cache.k[1:], exact.cache.k[1:])
    assert torch.equal(case.cache.v[1:].double(), exact.cache.v[1:])
    assert case.metadata.workspace.counters.count_nonzero() == 0
    metadata, size = case.metadata, case.cache.k.shape[1]
    requests = token_request(metadata.query_start_loc)
    slots = slot_mapping(metadata.block_tables, requests, case.positions, size)
    assert torch.equal(slots, metadata.slot_mapping)
    # Of tokens without blocks, as of dummy requests, one keeps each slot of the null block.
    nowhere = torch.zeros_like(metadata.block_tables)
    slots = slot_mapping(nowhere, requests, case.positions, size, keeps_null_block=True)
    assert torch.equal(slots, torch.where(case.positions < size, case.positions, -1))
def check_elementwise(dtype):
    x, residual = torch.randn(2, 7, 36).to(dtype)
    weight = torch.randn(36).to(dtype)
    kept = residual.clone()
    normed = norms.add_rms_norm(x, residual, weight, 1e-6, rounds=False)
    assert torch.equal(residual, x + kept)
    assert_rows_close(normed, rms_norm(residual.double(), weight.double(), 1e-6))
    assert_rows_close(norms.rms_norm(x, weight, 1e-6), rms_norm(x.double(), weight.double(), 1e-6))
    wide = norms.rms_norm(x, weight.float() + 1.0, 1e-6)
    assert wide.dtype == dtype
    assert_rows_close(wide, rms_norm(x.double(), weight.double() + 1.0, 1e-6))
    assert_rows_close(gate.silu_and_mul(x), silu_and_mul(x.double()))
    wide = torch.randn(7, 80).to(dtype)[:, 5:41]
    gated = sigmoid_gate(x.double(), wide.double())
    assert_rows_close(factors.sigmoid_gate(x, wide), gated)
    gated = sigmoid_gate(x.double(), wide[:, :1].double())
    assert_rows_close(factors.sigmoid_gate(x, wide[:, :1]), gated)
    total = kept.clone()
    add_gated(total, x, wide, weight[None])
    factor = (wide.double() @ weight.double()[:, None]).sigmoid()
    assert_rows_close(total, kept.double() + factor * x.double())
    for size, has_weights in ((12, False), (12, True), (36, False)):
        weights = torch.randn(*((36 // size,) if has_weights else ()), size).to(dtype)
        for silu, first in ((True, False), (False, False), (True, True)):
            found = gated_norms.gated_rms_norm(
                x, wide, weights, 1e-6, has_silu=silu, gates_first=first
            )
            doubles = (each.double() for each in (x, wide, weights))
            exact = gated_rms_norm(*doubles, 1e-6, silu, first)
            assert_rows_close(found, exact)
    for part in (x[:, 3:15], x.view(7, 3, 12)[:, 1:], x.view(7, 3, 12)[..., 2:]):
        gain = weight[: part.shape[-1]]
        normed = norms.rms_norm(part, gain, 1e-6)
        assert normed.is_contiguous()
        assert_rows_close(normed, rms_norm(part.double(), gain.double(), 1e-6))
    parts = torch.randn(3, 7, 36)
    kept = residual.double()
    normed = norms.add_rms_norm(parts, residual, weight, 1e-6, rounds=False)
    assert_rows_close(residual, parts.double().sum(0) + kept)
    assert_rows_close(normed, rms_norm(residual.double(), weight.double(), 1e-6))
    vectors = torch.randn(11, 36).to(dtype)
    for ids in (torch.tensor([-1, 0, 4, 5, 15, 16, 2**30]), torch.arange(3, 10, dtype=torch.int32)):
        embedded = shards.local_embedding(ids, vectors, 5)
        assert torch.equal(embedded, local_embedding(ids, vectors, 5))
    heads = torch.randn(7, 5, 24).to(dtype)[:, 1:4, 4:16]
    cos, sin = torch.randn(7, 1, 12).to(dtype).chunk(2, dim=-1)
    turn = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    turned = turning.rotary(heads, *turn)
    assert turned.is_contiguous()
    assert_rows_close(turned, rotary(heads.double(), *(x.double() for x in turn)))

for dtype in DTYPES:
    check_elementwise(dtype)
for turn, size in enumerate(((1, 12, 40), (2, 13, 64), (4, 7, 100))):
    for number, options in enumerate(OPTIONS.values()):
        case = make_linear_case(*size, **options, dtype=DTYPES[(turn + number) % 2])
        if case.bias is None or not case.is_gated:
            tiles = VectorTiles(rows=4, columns=32, num_warps=4)
            assert_rows_close(case.run_vector(tiles), case.exact())
for turn, size in enumerate(((1, 12, 256), (2, 128, 200), (1, 256, 130), (4, 130, 384))):
    for scales in ("row", "block"):
        for number, options in enumerate(OPTIONS.values()):
            dtype = DTYPES[(turn + number) % 2]
            case = make_linear_case(*size, **options, dtype=dtype, scales=scales)
            is_whole = scales == "row" or size[1] % 128 == 0
            if not case.is_gated or (case.bias is None and is_whole):
                tiles = VectorTiles(rows=32, columns=128, num_warps=4)
                assert_rows_close(case.run_vector(tiles), case.exact())
"""

FP8_CACHE_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.attention import attention
from tests.support.attention_case import Heads, exact_cache, make_case
from tests.support.tolerances import assert_rows_close

ODD = Heads(num_heads=6, num_kv_heads=2, head_dim=12)
# From 64 on decode attention reads values by words.
LARGE = Heads(num_heads=3, num_kv_heads=1, head_dim=68)
CASES = [
    (([1] * 5, [5, 1, 0, 170, 16]), ODD, {}),
    (([1, 7, 40, 1], [5, 7, 170, 33]), ODD, {"sliding_window": 33, "has_sinks": True}),
    (([1, 17], [9, 33]), ODD, {"has_rotation": False, "block_size": 5}),
    (([1] * 4, [5, 0, 170, 16]), LARGE, {"sliding_window": 33, "has_sinks": True}),
    (([1, 7, 1], [70, 7, 1]), LARGE, {}),
    # Parts of one held tile, some with a loop after it.
    (([1] * 3, [300, 129, 1]), LARGE, {}),
    (([1] * 17, [170, 65, 66, 1, 0] + [3] * 12), LARGE, {}),
    (([1] * 17, [300, 140, 1, 0] + [66] * 13), LARGE, {"sliding_window": 200, "has_sinks": True}),
    (([1] * 4, [5, 0, 170, 16]), LARGE, {"soft_cap": 1.5, "scale": 0.4}),
    (([1, 7, 1], [70, 7, 1]), ODD, {"soft_cap": 1.5}),
    (([1] * 17, [300, 140, 1, 0] + [66] * 13), LARGE, {"sliding_window": -140}),
    (([1, 7, 40, 1], [5, 69, 170, 33]), ODD, {"sliding_window": -33}),
]
# The interpreter loses the carry of a rounding to 8 bits: 127.7 becomes 64 instead of 128.
WRITTEN_TOLERANCE = 0.3
# Cases take turns with types, as above.
for number, (batch, heads, options) in enumerate(CASES):
    dtype = (torch.float32, torch.float16)[number % 2]
    case = make_case(*batch, heads, dtype=dtype, has_fp8_cache=True, **options)
    exact = case.exact()
    exact.run()
    output = torch.full(case.q.shape, torch.nan, dtype=dtype)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform,
        case.sliding_window, case.sinks, case.scale or case.q.shape[2] ** -0.5, case.soft_cap,
    )
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    assert_rows_close(output[live], case.exact_reading().run()[live])
    assert output[~live].count_nonzero() == 0
    cache = exact_cache(case.cache)
    for name, numbers in exact.cache.tensors().items():
        assert_rows_close(cache.tensors()[name][1:], numbers[1:], WRITTEN_TOLERANCE)
        scale = case.cache.tensors()[f"{name}_scale"][1:].double()
        largest = numbers[1:].abs().amax(-1)
        torch.testing.assert_close(scale, largest / 448, rtol=1e-5, atol=0)
"""

WIDENED_PROGRAM = """
import torch
torch.set_num_threads(1)
from types import SimpleNamespace
from models.kernels.attention.prefill import prefill_attention, widened_cache
from tests.support.attention_case import Heads, exact_cache, make_case
from tests.support.tolerances import assert_rows_close

# Copies of the keys that later chunks attend to, with room for all of them or for some.
QUERIES, LENGTHS = [1, 20, 30, 0, 2, 9, 3], [40, 70, 30, 50, 300, 0, 90]
HEADS = Heads(num_heads=2, num_kv_heads=2, head_dim=16)
for window, room, ready in (
    (None, 100, [0, 1, 1, 0, 1, 1, 1]), (None, 29, [0, 1, 1, 0, 1, 1, 0]),
    (None, 5, [0, 1, 1, 0, 0, 1, 0]), (33, 9, [0, 1, 1, 0, 1, 1, 0]),
    (-60, 10, [0, 1, 1, 0, 1, 1, 0]),
):
    case = make_case(
        QUERIES, LENGTHS, HEADS, dtype=torch.float16, has_fp8_cache=True, has_rotation=False
    )
    widened_cache._MOST_BYTES = room * 2 * 16 * 2 * 16 * 2
    wide = widened_cache.widen(
        case.cache, case.metadata, torch.float16, keys=32, min_queries=2, sliding_window=window
    )
    assert wide.num_blocks == room
    assert wide.is_ready.tolist() == ready, (window, room, wide.is_ready)
    assert wide.is_lacking.tolist() == [int(0 in (ready[1], ready[4], ready[6]))]
    exact = exact_cache(case.cache)
    taken = []
    for request, (count, length) in enumerate(zip(QUERIES, LENGTHS)):
        if not ready[request] or count >= length:
            continue
        first = 0 if window is None else max(length - count + 1 - window, 0) // 32 * 2
        if window == -60:
            first = (length - count) // 60 * 60 // 32 * 2
        blocks = wide.metadata.block_tables[request, first : -(-length // 16)].long()
        owned = case.metadata.block_tables[request, first : -(-length // 16)].long()
        taken += blocks.tolist()
        assert_rows_close(wide.cache.k[blocks], exact.k[owned])
        assert_rows_close(wide.cache.v[blocks], exact.v[owned])
    assert len(set(taken)) == len(taken) and max(taken) < room

# Chunks whose keys found no room, after a kernel for Hopper GPUs that writes nothing here.
prefill_attention.hopper_tiles = lambda *_: SimpleNamespace(keys=32)
prefill_attention.hopper_attention = lambda *_, **options: None
prefill_attention._PROGRAMS_OF_REST = 2
for room in (100, 5):
    widened_cache._MOST_BYTES = room * 2 * 16 * 2 * 16 * 2
    case = make_case(
        [1, 20, 30, 2, 3], [40, 70, 30, 300, 90], HEADS, dtype=torch.float16, has_fp8_cache=True,
        has_rotation=False,
    )
    output = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    prefill_attention.prefill_attention(
        case.q, case.k, case.v, case.cache, case.metadata, output, min_queries=2,
        sliding_window=None, sinks=None, scale=0.25, soft_cap=0.0,
    )
    is_left = (torch.arange(len(output)) >= 51) & (room == 5)
    assert output[~is_left].isnan().all()
    if room == 5:
        assert_rows_close(output[is_left], case.exact_reading().run()[is_left])
"""

FEW_QUERIES_PROGRAM = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
from models.kernels.attention import attention
from models.kernels.attention.decode import few_queries
from models.kernels.attention.prefill import prefill_attention
from tests.support.attention_case import Heads, make_case
from tests.support.tolerances import assert_rows_close

# Without a GPU, the portable kernel takes longer chunks.
prefill_attention.hopper_tiles = lambda *_: None
num_parts = []

def add_parts(q, output, shared, **options):
    add(q, output, shared, **options)
    num_parts.append(shared.plan[1 : 1 + shared.plan[0, 0], 0].tolist())

add, few_queries.add_parts = few_queries.add_parts, add_parts
# Most programs of a GPU would find no work.
gpus_tiles = few_queries.few_query_tiles
few_queries.few_query_tiles = lambda *sizes, **options: replace(
    gpus_tiles(*sizes, **options), num_programs=64
)
WINDOW = {"sliding_window": 99, "has_sinks": True}
for batch, heads, options in (
    (([2, 1, 0, 4], [405, 9, 0, 300]), (6, 2, 64), {}),
    (([5, 3, 0, 2], [405, 3, 0, 333]), (8, 2, 64), {}),
    (([5, 1, 2, 0, 3], [300, 3, 140, 0, 9]), (4, 1, 64), {}),
    (([4, 3], [300, 290]), (3, 1, 68), WINDOW),
    (([16, 1, 3], [333, 150, 2]), (7, 1, 64), WINDOW | {"block_size": 5}),
    # Rows of one tile in two chunks, and a chunk that begins with a query.
    (([5, 4, 3], [302, 299, 151]), (4, 1, 64), {"sliding_window": -150}),
    (([70, 3, 1], [90, 200, 30]), (4, 1, 64), {"soft_cap": 1.5, "has_rotation": False}),
):
    heads = Heads(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    case = make_case(*batch, heads, dtype=torch.float16, has_fp8_cache=True, **options)
    case = case.with_chunks()
    case.leave_window()
    output = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform,
        case.sliding_window, case.sinks, case.q.shape[2] ** -0.5, case.soft_cap,
    )
    assert_rows_close(output, case.exact_reading().run())
    parts = num_parts.pop()
    assert max(parts) > 1 and 1 not in parts, parts

# A request of tokens without keys, as of a recorded step, gets zeros.
case = make_case([3, 3], [200, 0], Heads(num_heads=2, num_kv_heads=1, head_dim=64),
    dtype=torch.float16, has_fp8_cache=True, has_rotation=False)
output = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
attention.attend(
    case.q, case.k, case.v, output, case.cache, case.metadata, None, None, None, 0.1, 0.0
)
assert output[3:].count_nonzero() == 0 and output[:3].isfinite().all()
"""

SHARED_PROGRAM = """
import torch
torch.set_num_threads(1)
import triton.language as tl
from models.operands.rounded_activations import rounded_parts
from models.kernels.attention import attention
from models.kernels.attention.prefill import prefill_attention, tile_parts
from models.kernels.products.fp8.fp8_linear import quantize
from tests.support.attention_case import Heads, make_case
from tests.support.tolerances import assert_rows_close

# Shorter parts than on a GPU, as the interpreter takes long.
prefill_attention.LEAST_PART = tile_parts.LEAST_PART = tl.constexpr(64)
num_parts = []

def add_parts(q, output, shared, **options):
    add(q, output, shared, **options)
    lines = shared.plan[1 : 1 + shared.plan[0, 0]] if shared.num_shares > 0 else shared.plan[:0]
    num_parts.append(sorted(set(lines[:, 0].tolist())) if len(lines) else [])

add, prefill_attention.add_parts = prefill_attention.add_parts, add_parts
BATCH = [2, 1, 20, 3], [150, 30, 20, 330]
for options, expected in (
    ({}, [0, 2, 5]),
    ({"sliding_window": 130, "has_sinks": True}, [0, 2]),
    ({"soft_cap": 0.7, "has_fp8_cache": True}, [0, 2, 5]),
    # Chunks begin before one request's tokens, and within the other's.
    ({"sliding_window": -149}, [0]),
    ({"sliding_window": -160}, [0, 2]),
):
    case = make_case(*BATCH, Heads(num_heads=3, num_kv_heads=1, head_dim=12), **options)
    output = torch.full(case.q.shape, torch.nan)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform,
        case.sliding_window, case.sinks, case.q.shape[2] ** -0.5, case.soft_cap,
    )
    exact = case.exact_reading() if "has_fp8_cache" in options else case.exact()
    assert_rows_close(output, exact.run())
    assert num_parts.pop() == expected

case = make_case([2], [150], Heads(num_heads=2, num_kv_heads=1, head_dim=128))
outputs = []
for rounds in (False, True):
    output = torch.full(case.q.shape, torch.nan)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform, None, None, 0.1,
        0.0, rounds=rounds,
    )
    outputs.append(output)
    assert num_parts.pop() == [0, 2]
parts = zip(rounded_parts(outputs[1]), quantize(outputs[0].flatten(1), 128), strict=True)
assert all(torch.equal(part.float(), each.float()) for part, each in parts)
"""

ROUNDED_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.operands.rounded_activations import rounded_parts
from models.kernels.attention import attention
from models.kernels.products.fp8.fp8_linear import quantize
from tests.support.attention_case import Heads, make_case

HEADS = Heads(num_heads=3, num_kv_heads=1, head_dim=128)
CASES = [
    (([1] * 5, [5, 1, 0, 600, 16]), torch.float16, {}),
    (([1, 1], [9, 70]), torch.float16, {"has_rotation": False, "has_fp8_cache": True}),
    # With 16 bits the kernel for Hopper GPUs would run, which the interpreter has not.
    (([1, 7, 1, 1], [5, 7, 300, 0]), torch.float32, {"has_sinks": True}),
    (([3, 0, 1, 4], [9, 0, 8, 4]), torch.float32, {}),
    (([33], [33]), torch.float32, {"has_rotation": False}),
]
for batch, dtype, options in CASES:
    outputs = []
    for rounds in (False, True):
        case = make_case(*batch, HEADS, dtype=dtype, **options)
        output = torch.full(case.q.shape, torch.nan, dtype=dtype)
        attention.attend(
            case.q, case.k, case.v, output, case.cache, case.metadata, case.transform,
            None, case.sinks, 0.1, 0.0, rounds=rounds,
        )
        outputs.append(output)
    plain, rounded = outputs
    parts = zip(rounded_parts(rounded), quantize(plain.flatten(1), 128), strict=True)
    assert all(torch.equal(part.float(), each.float()) for part, each in parts)
"""

SEGMENTS_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.attention.segment_attention import segment_attention
from tests.support.segments import bounds_of, reference

# One image, some, with padding, windows, and tiles of rows that segments share.
LENGTHS = [200], [5, 130, 1], [64, 64, 33, 64, 64], [31, 1, 32, 40]
# Heads of one part and of two, and less than a part.
HEADS = 64, 72, 80, 12
for number, lengths in enumerate(LENGTHS):
    for head_dim in HEADS:
        dtype = (torch.float32, torch.float16)[(number + head_dim // 8) % 2]
        torch.manual_seed(head_dim)
        heads = torch.randn(sum(lengths), 6, head_dim).to(dtype)
        q, k, v = heads[:, :2], heads[:, 2:4].contiguous(), heads[:, 4:]
        bounds = bounds_of(lengths)
        actual = segment_attention(q, k, v, bounds, 0.3)
        expected = reference(q, k, v, bounds, 0.3)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-3
        assert (actual - expected).abs().max() <= tolerance, (lengths, head_dim, dtype)
"""


ENCODER_PROGRAM = """
import torch
from torch.nn import functional
torch.set_num_threads(1)
from models.kernels.elementwise import turn_heads as kernel
from models.kernels.elementwise.layer_norm import add_layer_norm, layer_norm
from models.ops.elementwise.turn_heads import turn_heads

for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
    for size in (16, 72, 300):
        torch.manual_seed(size)
        x, residual = torch.randn(2, 5, size).to(dtype)
        weight, bias = torch.randn(2, size).to(dtype)
        expected = functional.layer_norm(x, (size,), weight, bias, 1e-6)
        assert (layer_norm(x, weight, bias, 1e-6) - expected).abs().max() <= tolerance
        total, normed = add_layer_norm(x, residual, weight, bias, 1e-6)
        assert torch.equal(total, x + residual)
        expected = functional.layer_norm(total, (size,), weight, bias, 1e-6)
        assert (normed - expected).abs().max() <= tolerance
    for head_dim in (8, 72):
        heads, angles = torch.randn(5, 6, head_dim).to(dtype)[:, 1:4], torch.randn(5, head_dim)
        rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
        expected = turn_heads(heads, rotation)
        assert (kernel.turn_heads(heads, rotation) - expected).abs().max() <= tolerance
    assert layer_norm(x[:0], weight, bias, 1e-6).shape == (0, size)
"""


PROGRAMS = {
    "encoder": ENCODER_PROGRAM,
    "plain": PLAIN_PROGRAM,
    "fp8-cache": FP8_CACHE_PROGRAM,
    "widened": WIDENED_PROGRAM,
    "few": FEW_QUERIES_PROGRAM,
    "shared": SHARED_PROGRAM,
    "rounded": ROUNDED_PROGRAM,
    "segments": SEGMENTS_PROGRAM,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_agree_with_the_references_in_the_interpreter(name):
    run_interpreted(PROGRAMS[name])
