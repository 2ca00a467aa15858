"""Times the kernels against torch's attention and the limits of memory and arithmetic.

    python -m tests.bench.kernels [--json out.json] [--only decode,fp8-decode,prefill,rows,linear]

Each figure is the median of replays of a graph of many launches that walk over more data than the
second-level cache holds. The floors are ceilings measured on an H200: reads at 4,482 GB/s, bf16
products at 734 TFLOP/s.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from models.kernels.attention.cache.rotate_and_cache import rotate_and_cache
from models.kernels.attention.decode.decode_attention import decode_attention
from models.kernels.attention.decode.prefix_attention import NewTokens
from models.kernels.attention.prefill.prefill_attention import prefill_attention
from models.kv_cache import KVCacheData
from models.ops.attention.head_transform import transform_heads
from models.ops.attention.kv_cache import write_kv_cache
from models.ops.elementwise.rms_norm import add_rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.linear import linear
from models.ops.products.norm_linear import gated_linear
from tests.bench.report import Report
from tests.support.attention_case import AttentionCase, Heads, make_case

BYTES_PER_US = 4482e3
FLOP_PER_US = 734e6
CACHE_BYTES = 50 * 2**20
MODELS = {
    "8B": (Heads(num_heads=32, num_kv_heads=8, head_dim=128), 4096, 12288),
    "0.6B": (Heads(num_heads=16, num_kv_heads=8, head_dim=128), 1024, 3072),
}
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (256, 704, 4096)
PREFILLS = ((1, 2048, 0), (1, 8192, 0), (16, 512, 0), (1, 2048, 6144), (32, 4, 4096))
TOKENS = (1, 32, 128, 2048, 8192)
FEW_TOKENS = (1, 2, 4, 8, 16, 32, 64)
VOCABULARY = 151936
SDPA_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


Figures = dict[str, float | None]
"""Microseconds of the kernel (us), of torch (torch_us) and of the floor (floor_us)."""


def microseconds(calls: Sequence[Callable[[], object]], rounds: int = 1) -> float:
    """Returns the time of one of the calls, which are captured one after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still make the inputs
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:]) / (rounds * len(calls))


def copies(num_bytes: int, most: int = 64) -> int:
    """Returns how many sets of data of this size flush the second-level cache."""
    return max(1, min(most, 4 * CACHE_BYTES // num_bytes))


def best_sdpa(calls: Callable[[], Sequence[Callable[[], object]]]) -> float | None:
    """Returns the time of torch's fastest attention that takes the call; None if none does."""
    found = []
    for backend in SDPA_BACKENDS:
        try:
            with sdpa_kernel(backend):
                found.append(microseconds(calls()))
        except RuntimeError:
            continue
    return min(found, default=None)


def cache_bytes(heads: Heads, batch: int, context: int, *, has_fp8_cache: bool) -> int:
    """Returns the bytes of keys and values that attention reads."""
    bytes_per_head = heads.head_dim + 4 if has_fp8_cache else 2 * heads.head_dim
    return 2 * batch * context * heads.num_kv_heads * bytes_per_head


def decode_calls(
    heads: Heads, batch: int, context: int, *, has_fp8_cache: bool
) -> tuple[list[Callable[[], object]], list[AttentionCase]]:
    """Returns launches of decode attention over different caches, and their cases."""
    num_bytes = cache_bytes(heads, batch, context, has_fp8_cache=has_fp8_cache)
    lens = [context] * batch
    cases = [
        make_case(
            [1] * batch,
            lens,
            heads,
            dtype=torch.bfloat16,
            device="cuda",
            has_fp8_cache=has_fp8_cache,
            seed=seed,
        )
        for seed in range(copies(num_bytes, 32))
    ]
    outputs = torch.empty(batch, heads.num_heads, heads.head_dim, device="cuda").bfloat16()
    first = cases[0]  # whose inputs but the cache are those of all layers of a step
    new = NewTokens(
        k=first.k, v=first.v, transform=first.transform, slot_mapping=first.metadata.slot_mapping
    )

    def call(cache: KVCacheData):
        return lambda: decode_attention(
            first.q,
            cache,
            first.metadata,
            outputs,
            new,
            sliding_window=None,
            sinks=None,
            scale=heads.head_dim**-0.5,
            soft_cap=0.0,
        )

    return [call(case.cache) for case in cases], cases


def decode(heads: Heads, batch: int, context: int, *, has_fp8_cache: bool) -> Figures:
    """Times attention of steps of single tokens, their norm, rotation and cache write included.

    torch gets keys and values side by side in memory and queries that are ready; it has nothing
    like a cache of 8 bits, of which scales are read too.
    """
    calls, cases = decode_calls(heads, batch, context, has_fp8_cache=has_fp8_cache)
    ours = microseconds(calls, rounds=2)
    num_bytes = cache_bytes(heads, batch, context, has_fp8_cache=has_fp8_cache)
    first = cases[0]
    shape = (batch, context, heads.num_kv_heads, heads.head_dim)

    def torch_calls():
        # Blocks without the null block are as large as a batch of contiguous sequences.
        pairs = [[x[1:].view(shape).transpose(1, 2) for x in (c.cache.k, c.cache.v)] for c in cases]
        q = first.q.contiguous()[:, :, None]
        return [
            lambda k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for k, v in pairs
        ]

    theirs = None if has_fp8_cache else best_sdpa(torch_calls)
    return {"us": ours, "torch_us": theirs, "floor_us": num_bytes / BYTES_PER_US}


def prefill_calls(
    heads: Heads, batch: int, num_tokens: int, num_cached: int
) -> tuple[list[Callable[[], object]], tuple[torch.Tensor, ...]]:
    """Returns launches of attention of chunks, and their queries, keys and values."""
    lens = [num_cached + num_tokens] * batch
    case = make_case([num_tokens] * batch, lens, heads, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.contiguous() for x in (case.q, case.k, case.v))
    output = torch.empty_like(q)
    call = partial(
        prefill_attention, q, k, v, case.cache, case.metadata, output, min_queries=1,
        sliding_window=None, sinks=None, scale=heads.head_dim**-0.5, soft_cap=0.0,
    )  # fmt: skip
    return [call] * 3, (q, k, v)


def prefill(heads: Heads, batch: int, num_tokens: int, num_cached: int) -> Figures:
    """Times causal attention of chunks with cached tokens before them; torch's, of one fresh
    prompt."""
    calls, (q, k, v) = prefill_calls(heads, batch, num_tokens, num_cached)
    ours = microseconds(calls)

    def torch_calls():
        inputs = [x[None].transpose(1, 2) for x in (q, k, v)]
        return [lambda: scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)] * 3

    theirs = best_sdpa(torch_calls) if batch == 1 and num_cached == 0 else None
    pairs = batch * num_tokens * (num_cached + num_tokens / 2)
    flop = 4 * pairs * heads.head_dim * heads.num_heads
    return {"us": ours, "torch_us": theirs, "floor_us": flop / FLOP_PER_US}


def norm(num_tokens: int, hidden: int) -> Figures:
    """Times the residual sum and norm against torch's two kernels."""
    num_bytes = num_tokens * hidden * 8
    pairs = [
        torch.randn(2, num_tokens, hidden, device="cuda").bfloat16().unbind(0)
        for _ in range(copies(num_bytes))
    ]
    weight = torch.randn(hidden, device="cuda").bfloat16()
    ours = microseconds([lambda x=x, y=y: add_rms_norm(x, y, weight, 1e-6) for x, y in pairs])

    def apart(x, y):
        return functional.rms_norm(x + y, weight.shape, weight, 1e-6)

    theirs = microseconds([lambda x=x, y=y: apart(x, y) for x, y in pairs])
    return {"us": ours, "torch_us": theirs, "floor_us": num_bytes / BYTES_PER_US}


def gate(num_tokens: int, inner: int) -> Figures:
    """Times the SwiGLU gate against torch's two kernels."""
    num_bytes = num_tokens * inner * 6
    inputs = [
        torch.randn(num_tokens, 2 * inner, device="cuda").bfloat16()
        for _ in range(copies(num_bytes))
    ]
    ours = microseconds([lambda x=x: silu_and_mul(x) for x in inputs])

    def apart(x):
        first, second = x.chunk(2, dim=-1)
        return functional.silu(first) * second

    theirs = microseconds([lambda x=x: apart(x) for x in inputs])
    return {"us": ours, "torch_us": theirs, "floor_us": num_bytes / BYTES_PER_US}


def rotate(heads: Heads, num_tokens: int) -> Figures:
    """Times head norms, rotation and cache write against the reference's kernels."""
    columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    num_bytes = num_tokens * columns * 4
    cases = [
        make_case([num_tokens], [num_tokens], heads, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed in range(copies(num_bytes, 8))
    ]
    rotated = [x.new_empty(x.shape) for x in (cases[0].q, cases[0].k)]

    def ours(case):
        slots = case.metadata.slot_mapping
        rotate_and_cache(case.q, case.k, case.v, *rotated, case.cache, slots, case.transform)

    def theirs(case):
        _, k = transform_heads(case.q, case.k, case.transform)
        write_kv_cache(case.cache, k, case.v, case.metadata.slot_mapping)

    return {
        "us": microseconds([lambda case=case: ours(case) for case in cases]),
        "torch_us": microseconds([lambda case=case: theirs(case) for case in cases]),
        "floor_us": num_bytes / BYTES_PER_US,
    }


def linear_calls(
    num_tokens: int, outputs: int, inputs: int, is_gated: bool
) -> tuple[list[Callable[[], object]], torch.Tensor, list[torch.Tensor]]:
    """Returns products with different weights, with their gate, and the inputs and weights."""
    rows = outputs * (2 if is_gated else 1)
    num_bytes = rows * inputs * 2
    weights = [
        torch.randn(rows, inputs, device="cuda").bfloat16() * inputs**-0.5
        for _ in range(copies(num_bytes))
    ]
    x = torch.randn(num_tokens, inputs, device="cuda").bfloat16()
    ours = gated_linear if is_gated else linear
    return [partial(ours, x, weight, None) for weight in weights], x, weights


def linear_product(num_tokens: int, outputs: int, inputs: int, is_gated: bool) -> Figures:
    """Times a product, with its gate, against torch's; the floor is reading the weights."""
    calls, x, weights = linear_calls(num_tokens, outputs, inputs, is_gated)

    def theirs(weight):
        output = functional.linear(x, weight)
        return silu_and_mul(output) if is_gated else output

    return {
        "us": microseconds(calls, 2),
        "torch_us": microseconds([lambda w=w: theirs(w) for w in weights], 2),
        "floor_us": 2 * weights[0].numel() / BYTES_PER_US,
    }


def jobs(only: set[str]) -> Iterator[tuple[str, str, str, Callable[[], Figures]]]:
    """Yields kernel, model, size, and a function that times them."""
    for model, (heads, hidden, inner) in MODELS.items():
        for kernel in ("decode", "fp8-decode"):
            is_fp8 = kernel == "fp8-decode"
            for batch, context in product(BATCHES, CONTEXTS) if kernel in only else ():
                size = f"{batch} x {context}"
                timed = partial(decode, heads, batch, context, has_fp8_cache=is_fp8)
                yield kernel, model, size, timed
        if "prefill" in only:
            for batch, num_tokens, num_cached in PREFILLS:
                size = f"{batch} x {num_tokens} behind {num_cached}"
                yield "prefill", model, size, partial(prefill, heads, batch, num_tokens, num_cached)
        if "linear" in only:
            attended = heads.num_heads * heads.head_dim
            projected = attended + 2 * heads.num_kv_heads * heads.head_dim
            shapes = {
                "qkv": (projected, hidden, False),
                "o": (hidden, attended, False),
                "gate_up": (inner, hidden, True),
                "down": (hidden, inner, False),
                "head": (VOCABULARY, hidden, False),
            }
            for (name, shape), num_tokens in product(shapes.items(), FEW_TOKENS):
                yield name, model, f"{num_tokens}", partial(linear_product, num_tokens, *shape)
        if "rows" in only:
            for num_tokens in TOKENS:
                size = f"{num_tokens}"
                yield "add_rms_norm", model, size, partial(norm, num_tokens, hidden)
                yield "silu_and_mul", model, size, partial(gate, num_tokens, inner)
                yield "rotate_and_cache", model, size, partial(rotate, heads, num_tokens)


def run(only: set[str], report: Report) -> None:
    """Measures, prints and reports each kernel, model and size."""
    for kernel, model, size, timed in jobs(only):
        figures = timed()
        torch.cuda.empty_cache()
        ours, theirs, floor = figures["us"], figures["torch_us"], figures["floor_us"]
        against = "-" if theirs is None else f"{theirs:.2f}"
        print(
            f"{kernel:16} {model:4} {size:>18} {ours:9.2f} us  torch {against:>9}  "
            f"floor {floor:9.2f}  x{ours / floor:.2f}",
            flush=True,
        )
        name = f"{kernel}, {model}, {size}"
        report.add(name, [ours], "us", is_shown=False)
        report.add(f"{name}, over floor", [ours / floor], "ratio", is_shown=False)
        if theirs is not None:
            report.add(f"{name}, over torch", [ours / theirs], "ratio", is_shown=False)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="decode,fp8-decode,prefill,rows,linear")
    arguments = parser.parse_args()
    run(set(arguments.only.split(",")), Report("kernels", path=arguments.json))


if __name__ == "__main__":
    main()
